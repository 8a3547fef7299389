"""The hooks of an engine: checked when they join, called by stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from types import TracebackType
from typing import Any, Self

from nvalchemi.errors import HookRegistrationError, add_hook_note
from nvalchemi.hooks.context import HookContext
from nvalchemi.hooks.lifecycle import HookLifecycle
from nvalchemi.hooks.protocols import Hook, RunsOnStage

__all__ = ["HookRegistry"]


_Call = Callable[[Any, Any], Any]


class HookRegistry:
    """Hooks by stage.

    Everything that can be wrong with a hook is found when it is registered; a dispatch only calls. A refused hook
    leaves the registry as it was.

    Parameters
    ----------
    stages : type of Enum
        The stages of the engine.
    slots : collection of Enum, optional
        Stages with at most one owner.
    owners_last : collection of Enum, optional
        Stages at which the hooks that own a slot are called after all others. Elsewhere they are called first.

    Examples
    --------
    >>> from nvalchemi.training.stages import TrainingStage
    >>> class Hello:
    ...     frequency = 1
    ...     stage = TrainingStage.AFTER_BATCH
    ...     def __call__(self, ctx, stage):
    ...         print("hello at", stage.name)
    >>> registry = HookRegistry(TrainingStage)
    >>> registry.register(Hello())
    >>> registry.dispatch(None, TrainingStage.AFTER_BATCH)
    hello at AFTER_BATCH
    """

    def __init__(self, stages: type[Enum], *, slots: Collection[Enum] = (), owners_last: Collection[Enum] = ()) -> None:
        self._stages = stages
        self._slots = frozenset(slots)
        self._owners_last = frozenset(owners_last)
        self._hooks: list[Hook] = []
        self._owners: dict[Enum, Hook] = {}
        self._calls: dict[Enum, list[tuple[Hook, _Call]]] = {stage: [] for stage in stages}
        self._lifecycle = HookLifecycle(self.__iter__)

    def __iter__(self) -> Iterator[Hook]:
        return iter(tuple(self._hooks))

    def __len__(self) -> int:
        return len(self._hooks)

    def owner(self, slot: Enum) -> Hook | None:
        """Return the hook that owns a slot, if any."""
        return self._owners.get(slot)

    def hooks_at(self, stage: Enum) -> tuple[Hook, ...]:
        """Return the hooks that a dispatch of `stage` calls, in order."""
        return tuple(hook for hook, _ in self._calls[stage])

    def register(self, hook: Hook) -> None:
        """Add a hook, or refuse it.

        Parameters
        ----------
        hook : Hook
            Called after those registered before it.

        Raises
        ------
        HookRegistrationError
            The object is no hook, is registered already, has a `frequency` that is not an int of 1 or more, a `stage`
            of another enum or none at all, or claims a slot that has an owner.
        """
        self._check(hook)
        claimed = self._claimed(hook)
        for slot in sorted(self._slots.intersection(claimed), key=lambda stage: stage.name):
            if slot in self._owners:
                raise HookRegistrationError(
                    f"{_name(hook)} claims {slot.name}, which {_name(self._owners[slot])} owns already; "
                    "a slot has one owner. Leave one of the two out, or make it an update hook that both can share."
                )
        self._hooks.append(hook)
        owns = self._slots.intersection(claimed)
        self._owners.update(dict.fromkeys(owns, hook))
        call = hook.__call__ if hook.frequency == 1 else _Throttled(hook)  # bound once, which is quicker to call
        for stage in claimed:
            self._insert(stage, hook, call, owner=bool(owns))

    def wrap_calls(self, wrap: Callable[[Hook, _Call], _Call]) -> Callable[[], None]:
        """Put something around the call of every hook, a clock for example.

        Parameters
        ----------
        wrap : callable
            Gets a hook and what is called for it, and returns what is to be called instead.

        Returns
        -------
        callable
            Takes it away again.
        """
        wrapped: dict[int, tuple[_Call, _Call]] = {}

        def around(hook: Hook, call: _Call) -> tuple[Hook, _Call]:
            new = call.around(wrap) if isinstance(call, _Throttled) else wrap(hook, call)
            wrapped[id(new)] = new, call
            return hook, new

        def undo() -> None:
            for calls in self._calls.values():  # in which there may be more by now
                calls[:] = [(hook, wrapped[id(call)][1] if id(call) in wrapped else call) for hook, call in calls]

        for calls in self._calls.values():
            calls[:] = [around(hook, call) for hook, call in calls]
        return undo

    def last_calls(self, hook: Any) -> dict[str, int]:
        """Return at which ``step_count`` a hook with a frequency ran last, by stage; empty for all other hooks."""
        return {stage.name: call.last[stage] for stage, call in self._throttled(hook).items() if stage in call.last}

    def set_last_calls(self, hook: Any, calls: Mapping[str, int]) -> None:
        """Give back what `last_calls` returned, so that the hook does not run twice at one ``step_count``."""
        for stage, call in self._throttled(hook).items():
            call.last.pop(stage, None)
            if stage.name in calls:
                call.last[stage] = calls[stage.name]

    def dispatch(self, ctx: Any, stage: Enum) -> None:
        """Call every hook of `stage` in order; an exception carries a note that says from which hook it came."""
        hook: Any = None
        try:
            for hook, call in self._calls[stage]:  # noqa: B007 - the note below says which
                call(ctx, stage)
        except Exception as error:  # noted and raised again
            add_hook_note(error, hook, stage, ctx)
            raise

    def __enter__(self) -> Self:
        self._lifecycle.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lifecycle.close(error, traceback)

    def close(self) -> None:
        """Close every hook that can be closed, in reverse order; twice is harmless."""
        self._lifecycle.close()

    def _throttled(self, hook: Any) -> dict[Enum, _Throttled]:
        entries = ((stage, one, call) for stage, calls in self._calls.items() for one, call in calls)
        return {stage: call for stage, one, call in entries if one is hook and isinstance(call, _Throttled)}

    def _check(self, hook: Any) -> None:
        missing = [name for name in ("frequency", "stage", "__call__") if not hasattr(hook, name)]
        if missing or isinstance(hook, type):
            what = "it is a class, not an instance" if isinstance(hook, type) else f"it has no {', no '.join(missing)}"
            raise HookRegistrationError(
                f"{_name(hook)} is no hook: {what}. A hook has `frequency`, `stage` and `__call__(ctx, stage)`."
            )
        if any(hook is other for other in self._hooks):
            raise HookRegistrationError(
                f"{_name(hook)} is registered already; register each instance once, or make a second one."
            )
        if type(hook.frequency) is not int or hook.frequency < 1:
            raise HookRegistrationError(
                f"{_name(hook)}.frequency is {hook.frequency!r}; it must be an int of 1 or more (1: at every dispatch)."
            )
        if hook.stage is not None and not isinstance(hook.stage, self._stages):
            raise HookRegistrationError(
                f"{_name(hook)}.stage is {hook.stage!r}, which is no {self._stages.__name__}; use one of "
                f"{', '.join(stage.name for stage in self._stages)}."
            )

    def _claimed(self, hook: Hook) -> list[Enum]:
        if hook.stage is not None:
            return [hook.stage]
        claimed = (
            [stage for stage in self._stages if hook._runs_on_stage(stage)] if isinstance(hook, RunsOnStage) else []
        )
        if not claimed:
            raise HookRegistrationError(
                f"{_name(hook)} runs at no stage: `stage` is None and `_runs_on_stage(stage)` is "
                f"{'False for every stage' if isinstance(hook, RunsOnStage) else 'missing'}; set `stage`, or return "
                f"True from `_runs_on_stage` for some {self._stages.__name__}."
            )
        return claimed

    def _insert(self, stage: Enum, hook: Hook, call: _Call, *, owner: bool) -> None:
        calls = self._calls[stage]
        owners = set(map(id, self._owners.values()))
        is_owner = [id(other) in owners for other, _ in calls]
        if stage in self._owners_last:
            position = len(calls) if owner else len(calls) - sum(is_owner)
        else:
            position = sum(is_owner) if owner else len(calls)
        calls.insert(position, (hook, call))


class _Throttled:
    """A hook that runs at every n-th step, once per step and stage however often the stage is dispatched."""

    def __init__(self, hook: Hook, call: _Call | None = None, last: dict[Enum, int] | None = None) -> None:
        self._hook = hook
        self._call = call or hook
        self._every = hook.frequency
        self.last = {} if last is None else last

    def around(self, wrap: Callable[[Hook, _Call], _Call]) -> _Throttled:
        """Return the same hook, at the same steps, called through what `wrap` makes of its call."""
        return _Throttled(self._hook, wrap(self._hook, self._call), self.last)

    def __call__(self, ctx: Any, stage: Enum) -> None:
        possible = ctx.possible_step_counts if isinstance(ctx, HookContext) else (ctx.step_count,)
        if not any(self._is_due(count, stage) for count in possible):
            return  # whatever a pending step comes to
        count = ctx.step_count
        if self._is_due(count, stage):
            self.last[stage] = count
            self._call(ctx, stage)

    def _is_due(self, count: int, stage: Enum) -> bool:
        return count % self._every == 0 and self.last.get(stage) != count


def _name(hook: object) -> str:
    return hook.__name__ if isinstance(hook, type) else type(hook).__name__
