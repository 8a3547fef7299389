"""How long the calls of each hook take, stage by stage, for as long as somebody wants to know."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from enum import Enum
from types import TracebackType, new_class
from typing import Any, Self

from nvalchemi.hooks.registry import HookRegistry
from nvalchemi.metadata import provenance_of
from nvalchemi.training.arguments import global_rank
from nvalchemi.training.hook_timing import Clock, HookTiming, table
from nvalchemi.training.hooks.orchestrator import TrainingUpdateOrchestrator
from nvalchemi.training.hooks.update import TrainingUpdateHook, overrides
from nvalchemi.training.stages import TrainingStage

__all__ = ["HookTrace", "TraceReport"]

_METHODS = {
    "setup": "SETUP",
    "before_batch": "BEFORE_BATCH",
    "transform_loss": "DO_BACKWARD",
    "before_optimizer_step": "DO_OPTIMIZER_STEP",
    "after_optimizer_step": "AFTER_OPTIMIZER_STEP",
    "settled": "settled",
}


class HookTrace:
    """Time the hooks of a strategy, of an orchestrator or of a registry while a block runs; ``str()`` of it is a table.

    A traced hook becomes, for as long as it is traced, an instance of a subclass made for it; before and after, nothing
    is there that could cost anything. What is measured is time on the host: on a GPU the work itself ends later.

    Each call is also logged by ``nvalchemi.hooks.trace`` at level DEBUG. With ``NVALCHEMI_HOOKS_TRACE=1`` a strategy
    traces its hooks by itself, and prints the table on standard error after each run.

    Parameters
    ----------
    target : TrainingStrategy, TrainingUpdateOrchestrator or HookRegistry
        Whose hooks.

    Examples
    --------
    >>> from nvalchemi.hooks import TrainContext
    >>> from nvalchemi.training.hooks import AlwaysVeto, TrainingUpdateOrchestrator
    >>> update = TrainingUpdateOrchestrator(AlwaysVeto())
    >>> with HookTrace(update) as trace:
    ...     update(TrainContext(), TrainingStage.DO_OPTIMIZER_STEP)
    >>> [(timing.hook, timing.stage, timing.calls) for timing in trace.timings]
    [('always_veto', 'DO_OPTIMIZER_STEP', 1)]
    """

    def __init__(self, target: Any) -> None:
        registry = getattr(target, "registry", target)
        if isinstance(registry, TrainingUpdateOrchestrator):
            self._registry: HookRegistry | None = None
            self._orchestrators = [registry]
        elif isinstance(registry, HookRegistry):
            self._registry = registry
            registered: list[Any] = list(registry)
            self._orchestrators = [hook for hook in registered if isinstance(hook, TrainingUpdateOrchestrator)]
        else:
            raise TypeError(f"HookTrace got a {type(target).__name__}; give a strategy, an orchestrator or a registry.")
        self._timings: dict[tuple[int, str], HookTiming] = {}
        self._undo = ExitStack()

    @property
    def timings(self) -> list[HookTiming]:
        """What was measured, the longest first."""
        return sorted(self._timings.values(), key=lambda timing: -timing.seconds)

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            if self._registry is not None:
                undo.callback(self._registry.wrap_calls(self._wrapped))
            for orchestrator in self._orchestrators:
                for child in orchestrator.iter_hooks():
                    undo.callback(object.__setattr__, child, "__class__", type(child))
                    object.__setattr__(child, "__class__", self._traced_class(child))  # pydantic refuses to set it
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._undo.close()

    def __str__(self) -> str:
        return "\n".join(table(self.timings))

    def _timing(self, hook: Any, stage: str) -> HookTiming:
        key = id(hook), stage
        if key not in self._timings:
            name: str = getattr(hook, "state_key", "") or getattr(hook, "__name__", type(hook).__name__)
            self._timings[key] = HookTiming(name, str(provenance_of(hook) or "no distribution"), stage)
        return self._timings[key]

    def _wrapped(self, hook: Any, call: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        if isinstance(hook, TraceReport):
            return call

        def timed(ctx: Any, stage: Any) -> None:
            with Clock(self._timing(hook, stage.name), ctx) as clock:
                clock.answer = call(ctx, stage)

        return timed

    def _traced_class(self, hook: TrainingUpdateHook) -> type:
        """Return a subclass of the hook's class with clocks around whatever the orchestrator calls."""
        cls: Any = type(hook)

        def reduce(hook: Any, protocol: Any) -> Any:
            make, arguments, *rest = cls.__reduce_ex__(hook, protocol)
            if make.__name__ == "__newobj__":  # which pickle lets make nothing but instances of the hook's own class
                make = _new
            return make, tuple(cls if one is traced else one for one in arguments), *rest  # it travels untraced

        namespace = {
            **{name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")},
            **{name: _untraced(cls, name) for name in ("__copy__", "__deepcopy__") if hasattr(cls, name)},
            "__reduce_ex__": reduce,
            **({"__call__": self._timed_call(cls)} if overrides(hook, "__call__") else self._timed_methods(hook)),
        }
        traced = new_class(cls.__name__, (cls,), exec_body=lambda body: body.update(namespace))
        traced.name = cls.name  # type: ignore[attr-defined]  # not that of the subclass
        return traced

    def _timed_call(self, cls: Any) -> Callable[..., Any]:
        def timed(hook: Any, ctx: Any, stage: TrainingStage, will_skip: bool = False) -> Any:
            with Clock(self._timing(hook, stage.name), ctx) as clock:
                clock.answer = cls.__call__(hook, ctx, stage, will_skip)
            return clock.answer

        return timed

    def _timed_methods(self, hook: TrainingUpdateHook) -> dict[str, Callable[..., Any]]:
        def timed(method: Callable[..., Any], stage: str) -> Callable[..., Any]:
            def call(hook: Any, ctx: Any, *arguments: Any, **keywords: Any) -> Any:
                with Clock(self._timing(hook, stage), ctx) as clock:
                    clock.answer = method(hook, ctx, *arguments, **keywords)
                return clock.answer

            return call

        return {name: timed(getattr(type(hook), name), at) for name, at in _METHODS.items() if overrides(hook, name)}


def _untraced(cls: Any, name: str) -> Callable[..., Any]:
    """Return a class's own way to copy, whose copies are not traced."""

    def copied(hook: Any, *memo: Any) -> Any:
        copy = getattr(cls, name)(hook, *memo)
        object.__setattr__(copy, "__class__", cls)
        return copy

    return copied


def _new(cls: Any, *arguments: Any) -> Any:
    return cls.__new__(cls, *arguments)


class TraceReport:
    """A plain hook that does nothing but print a trace when a run is over."""

    frequency = 1
    stage: Enum | None = TrainingStage.AFTER_TRAINING

    def __init__(self) -> None:
        self.trace: HookTrace | None = None

    def __call__(self, ctx: Any, stage: Any) -> None:
        """Wait: other hooks are closed before this one."""

    def close(self) -> None:
        """Print what was measured, on the first rank."""
        if self.trace is not None and self.trace.timings and global_rank() == 0:
            print(self.trace, file=sys.stderr)
