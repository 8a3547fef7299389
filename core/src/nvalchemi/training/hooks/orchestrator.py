"""Composing update hooks: one order, one backward, one step that all of them agree to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from nvalchemi.errors import HookConflictError, add_hook_note
from nvalchemi.hooks.lifecycle import HookLifecycle, close_all
from nvalchemi.hooks.protocols import CheckpointableHook
from nvalchemi.training.hooks.composition import checked_hook, checked_priorities, refuse_conflicts
from nvalchemi.training.hooks.conductor import Conductor
from nvalchemi.training.hooks.explanation import Explanation, explain_hooks
from nvalchemi.training.hooks.pending import PendingStep
from nvalchemi.training.hooks.stepping import StepOutcome
from nvalchemi.training.hooks.update import TrainingUpdateHook
from nvalchemi.training.stages import TrainingStage

if TYPE_CHECKING:
    from nvalchemi.hooks.context import TrainContext

__all__ = ["TrainingUpdateOrchestrator"]


class TrainingUpdateOrchestrator:
    """Update hooks, composed so that any of them can veto and none goes wrong for it.

    Children act in the order of their `priority`, ties in the order given. Every child is called at every stage, also
    after a veto; ``will_skip`` tells it so.

    ==================== =========================================================================================
    stage                what happens
    ==================== =========================================================================================
    SETUP                every child prepares
    BEFORE_BATCH         gradients are zeroed, unless a child vetoes: then they are kept
    DO_BACKWARD          each child transforms the loss its predecessor returned; ``backward()`` once, on the last
    DO_OPTIMIZER_STEP    optimizers step, then schedulers, then the scaler closes its window; with a veto nothing moves
    AFTER_OPTIMIZER_STEP every child reacts, then learns what is settled
    ==================== =========================================================================================

    It is a plain `nvalchemi.hooks.Hook` and works in any loop; a `nvalchemi.training.TrainingStrategy` makes its own.

    Parameters
    ----------
    *hooks : TrainingUpdateHook or TrainingUpdateOrchestrator
        Orchestrators among them are flattened. None at all is legal: zero_grad, backward and step remain.
    priorities : mapping of str to int, optional
        Other priorities, by `state_key`; see `with_priority`.
    lazy : bool
        Do not wait for the device at the step; see `resolve`. A composition is lazy if any part of it is.

    Raises
    ------
    TypeError
        An argument is no update hook: named by position and type.
    HookConflictError
        A ``ValueError``: two hooks exclude each other, are the same instance, or cannot be told apart.

    Examples
    --------
    >>> from nvalchemi.training.hooks.update import AlwaysVeto, PassThrough
    >>> [hook.name for hook in TrainingUpdateOrchestrator(PassThrough(), AlwaysVeto()).iter_hooks()]
    ['pass_through', 'always_veto']
    >>> [hook.name for hook in (PassThrough() + AlwaysVeto()).iter_hooks()]
    ['pass_through', 'always_veto']
    """

    frequency = 1
    stage: TrainingStage | None = None

    def __init__(
        self,
        *hooks: TrainingUpdateHook | TrainingUpdateOrchestrator,
        priorities: Mapping[str, int] | None = None,
        lazy: bool = False,
    ) -> None:
        self.lazy = lazy
        self._priorities: dict[str, int] = {}
        flat: list[TrainingUpdateHook] = []
        for position, hook in enumerate(hooks):
            if isinstance(hook, TrainingUpdateOrchestrator):
                self.lazy |= hook.lazy
                self._priorities.update(hook._priorities)
                flat.extend(hook._given)
            else:
                flat.append(checked_hook(hook, position))
        refuse_conflicts(flat)
        self._given: tuple[TrainingUpdateHook, ...] = tuple(flat)
        self._priorities.update(checked_priorities(priorities or {}, flat))
        self._children = tuple(sorted(flat, key=self._priority))
        self._conductor = Conductor(self._children, lazy=self.lazy)
        self._stages = self._conductor.stages()
        self._lifecycle = HookLifecycle(self.iter_hooks)

    # As a hook.

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        return stage in self._stages

    def __call__(self, ctx: TrainContext, stage: TrainingStage) -> None:
        """Do the work of `stage`; a stage that is not claimed changes nothing."""
        work = self._stages.get(stage)
        if work is None:
            if not isinstance(stage, TrainingStage):
                raise TypeError(
                    f"The stage is {stage!r}; call orchestrator(ctx, TrainingStage.BEFORE_BATCH) and so on."
                )
            return
        turn = self._conductor.turn
        try:
            work(ctx)
        except Exception as error:  # noted and raised again
            if turn.hook is not None:
                add_hook_note(error, turn.hook, stage, ctx)
            ctx.close(error)
            raise
        finally:
            turn.hook = None

    # What happened, and what would.

    def resolve(self) -> StepOutcome | None:
        """Let the host know what the latest optimizer-step stage came to, and return it; None before the first.

        In lazy mode a step is taken under a veto that stays on the device, and the host does not wait for it. The
        outcome is fetched here: schedulers move, counters count, and every child is told by ``settled``. Whoever reads
        the outcome, or anything that depends on it, through a context, a strategy or this orchestrator calls it
        unknowingly; the next optimizer step, a save, the end of a run and `close` do so as well. Calling it twice is
        harmless.

        Examples
        --------
        >>> import torch
        >>> from nvalchemi.hooks import TrainContext
        >>> update = TrainingUpdateOrchestrator(lazy=True)
        >>> update.resolve() is None
        True
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> with TrainContext(optimizers=[torch.optim.SGD([weight], lr=0.5)]) as ctx:
        ...     update(ctx, TrainingStage.BEFORE_BATCH)
        ...     ctx.loss = weight.sum()
        ...     update(ctx, TrainingStage.DO_BACKWARD)
        ...     update(ctx, TrainingStage.DO_OPTIMIZER_STEP)
        >>> update.resolve().skipped
        False
        """
        return self._conductor.latest.resolve()

    @property
    def pending(self) -> PendingStep | None:
        """The step whose outcome the host has not asked for yet, in lazy mode."""
        return self._conductor.latest.pending

    def await_step(self, pending: PendingStep | None) -> PendingStep | None:
        """Wait for another step than the pending one, which is returned: for whoever replays captured steps."""
        latest = self._conductor.latest
        before, latest.pending = latest.pending, pending
        return before

    @property
    def optimizer_step_skipped(self) -> bool:
        """Whether no optimizer stepped at the latest optimizer-step stage; False before the first."""
        outcome = self.resolve()
        return outcome is not None and outcome.skipped

    @property
    def last_outcome(self) -> StepOutcome | None:
        """Who vetoed and why, and which optimizer stepped, at the latest optimizer-step stage; None before it."""
        return self.resolve()

    def iter_hooks(self) -> Iterator[TrainingUpdateHook]:
        """Iterate over the children in the order in which they are called."""
        return iter(self._children)

    def explain(self) -> Explanation:
        """Say what is called when and why, who may veto, and where each child comes from.

        Examples
        --------
        >>> from nvalchemi.training.hooks.update import AlwaysVeto
        >>> "always_veto" in str(TrainingUpdateOrchestrator(AlwaysVeto()).explain())
        True
        """
        ordered = [(child, self._priority(child)) for child in self._children]
        return explain_hooks(ordered, self._priorities, self.resolve())

    def with_priority(self, priorities: Mapping[str, int]) -> TrainingUpdateOrchestrator:
        """Return the same hooks in another order.

        Parameters
        ----------
        priorities : mapping of str to int
            The new priority by `state_key`; the others keep theirs.

        Raises
        ------
        HookConflictError
            A key that no child has: the closest is named.
        """
        return TrainingUpdateOrchestrator(*self._given, priorities={**self._priorities, **priorities}, lazy=self.lazy)

    def __add__(self, other: object) -> TrainingUpdateOrchestrator:
        return TrainingUpdateOrchestrator(self, other)  # type: ignore[arg-type]

    def __radd__(self, other: object) -> TrainingUpdateOrchestrator:
        return self if other == 0 else TrainingUpdateOrchestrator(other, self)  # type: ignore[arg-type]

    # State and lifetime.

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every child that has one, by `state_key`."""
        self.resolve()
        return {
            child.state_key: child.state_dict() for child in self._children if isinstance(child, CheckpointableHook)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give every child its state back.

        Raises
        ------
        HookConflictError
            The state and the children do not belong together: what is missing or left over is named, nothing is loaded.
        """
        stateful = {c.state_key: c for c in self._children if isinstance(c, CheckpointableHook)}
        if set(stateful) != set(state):
            raise HookConflictError(
                f"The state holds {sorted(state)}, but the hooks with state are {sorted(stateful)}; compose the same "
                "hooks, or load each hook by itself."
            )
        before = self.state_dict()
        for place, (key, child) in enumerate(stateful.items()):
            try:
                child.load_state_dict(state[key])
            except Exception:  # raised again, once those loaded before it are as they were
                for loaded, one in list(stateful.items())[:place]:
                    one.load_state_dict(before[loaded])
                raise
        self.go_on(window_open=False)

    def go_on(self, *, window_open: bool) -> None:
        """Go on from a run that was loaded; what happened here before is left behind.

        Parameters
        ----------
        window_open : bool
            Gradients were loaded, too, and their window goes on: the next batch adds to them.
        """
        self._conductor.go_on(window_open=window_open)

    def __getstate__(self) -> dict[str, Any]:
        """Resolve first, so that hooks count what was under way."""
        self.resolve()
        return self.__dict__

    def __enter__(self) -> Self:
        self._lifecycle.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close(error, traceback)

    def close(self) -> None:
        """Resolve the latest step and close every child that can be closed, in reverse order; twice is harmless."""
        self._close()

    def _close(self, error: BaseException | None = None, traceback: TracebackType | None = None) -> None:
        closers = [("the latest step", self.resolve), ("hooks", lambda: self._lifecycle.close(error, traceback))]
        close_all(closers, error)

    # Inside.

    def _priority(self, hook: TrainingUpdateHook) -> int:
        return self._priorities.get(hook.state_key, hook.priority)
