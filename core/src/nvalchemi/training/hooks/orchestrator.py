"""Composing update hooks: one order, one backward, one step that all of them agree to."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from nvalchemi.errors import HookConflictError, HookContractError, add_hook_note
from nvalchemi.hooks.lifecycle import HookLifecycle
from nvalchemi.hooks.protocols import CheckpointableHook
from nvalchemi.training.closures import refuse_closure
from nvalchemi.training.hooks.explanation import Explanation, explain_hooks
from nvalchemi.training.hooks.stepping import StepOutcome, attempt_step
from nvalchemi.training.hooks.update import TrainingUpdateHook, overrides, takes_part_in_step
from nvalchemi.training.hooks.window import UpdateWindow
from nvalchemi.training.stages import TrainingStage

if TYPE_CHECKING:
    from nvalchemi.hooks.context import TrainContext

__all__ = ["TrainingUpdateOrchestrator"]

_ANSWER_IGNORED = (TrainingStage.SETUP, TrainingStage.AFTER_OPTIMIZER_STEP)
_GATED = (TrainingStage.BEFORE_BATCH, TrainingStage.DO_OPTIMIZER_STEP)


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
                flat.append(_checked(hook, position))
        _refuse_conflicts(flat)
        self._given: tuple[TrainingUpdateHook, ...] = tuple(flat)
        self._priorities.update(_checked_priorities(priorities or {}, flat))
        self._children = tuple(sorted(flat, key=self._priority))
        self._calls = self._handlers()
        self._setting_up = self._overriding("setup")
        self._before = self._overriding("before_batch")
        self._transforming = self._overriding("transform_loss")
        self._voting = tuple(child for child in self._children if takes_part_in_step(child))
        self._after = self._overriding("after_optimizer_step")
        self._settling = tuple(child for child in self._children if overrides(child, "settled"))
        self._at_work: TrainingUpdateHook | None = None
        self._lifecycle = HookLifecycle(self.iter_hooks)
        self._window: UpdateWindow | None = None
        self._outcome: StepOutcome | None = None

    # As a hook.

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        return stage in self._calls

    def __call__(self, ctx: TrainContext, stage: TrainingStage) -> None:
        """Do the work of `stage`; a stage that is not claimed changes nothing."""
        handler = self._calls.get(stage)
        if handler is None:
            if not isinstance(stage, TrainingStage):
                raise TypeError(
                    f"The stage is {stage!r}; call orchestrator(ctx, TrainingStage.BEFORE_BATCH) and so on."
                )
            return
        try:
            handler(ctx)
        except Exception as error:  # noted and raised again
            if self._at_work is not None:
                add_hook_note(error, self._at_work, stage, ctx)
            ctx.close(error)
            raise
        finally:
            self._at_work = None

    def _handlers(self) -> dict[TrainingStage, Callable[[TrainContext], None]]:
        return {
            TrainingStage.SETUP: self._setup,
            TrainingStage.BEFORE_BATCH: self._before_batch,
            TrainingStage.DO_BACKWARD: self._backward,
            TrainingStage.DO_OPTIMIZER_STEP: self._optimizer_step,
            TrainingStage.AFTER_OPTIMIZER_STEP: self._after_optimizer_step,
        }

    def _setup(self, ctx: TrainContext) -> None:
        for optimizer in ctx.optimizers:
            refuse_closure(type(optimizer))
        for child in self._setting_up:
            self._call(child, ctx, TrainingStage.SETUP, False)

    def _before_batch(self, ctx: TrainContext) -> None:
        ctx.step_skipped, ctx.outcome = False, None
        before = self._window
        window = self._current(ctx)
        window.begun &= window is before
        vetoed = False
        for child in self._before:
            vetoed |= not self._proceeds(child, ctx, TrainingStage.BEFORE_BATCH, vetoed)
        keep = vetoed or (self._outcome is not None and self._outcome.window_open)
        if keep:
            _refuse_mixed_scales(before)
        else:
            for optimizer in ctx.optimizers:
                optimizer.zero_grad(set_to_none=True)
        if not window.begun:
            window.adopt(ctx.optimizers, ctx.grad_scaler)  # a child may have published a scaler
        elif not keep:
            self._open_window(ctx)

    def _backward(self, ctx: TrainContext) -> None:
        original, loss = ctx.loss, ctx.loss
        try:
            for child in self._transforming:
                ctx.loss = _differentiable(loss, "the loss that was given")
                _, loss = self._call(child, ctx, TrainingStage.DO_BACKWARD, False)
                loss = _differentiable(loss, f"what {type(child).__name__} returned at DO_BACKWARD")
            _differentiable(loss, "the loss that was given").backward()  # type: ignore[no-untyped-call]
        finally:
            ctx.loss = original
            ctx.let_go_of_graph()
        window = self._current(ctx)
        window.follow(ctx.grad_scaler)
        window.refresh()

    def _optimizer_step(self, ctx: TrainContext) -> None:
        window = self._current(ctx)
        self._outcome, ctx.step_skipped = StepOutcome(skipped=True), True  # what holds if anything below raises
        window.follow(ctx.grad_scaler)
        if ctx.window_complete:
            self._vote(ctx, window)
            outcome = attempt_step(ctx, window)
        else:
            for child in self._voting:
                self._proceeds(child, ctx, TrainingStage.DO_OPTIMIZER_STEP, True)
            outcome = StepOutcome(skipped=True, window_open=True)
        self._outcome = ctx.outcome = outcome
        ctx.step_skipped = outcome.skipped

    def _vote(self, ctx: TrainContext, window: UpdateWindow) -> None:
        window.begin_voting()
        for child in self._voting:
            if not child.defers_veto:
                window.resolve()
            reads = child.reads_grad
            if reads:
                window.materialise()
            if not self._proceeds(child, ctx, TrainingStage.DO_OPTIMIZER_STEP, window.vetoed):
                window.veto(child)
            if reads:
                window.reread()
        window.voting = False

    def _after_optimizer_step(self, ctx: TrainContext) -> None:
        skipped = self.optimizer_step_skipped
        for child in self._after:
            self._call(child, ctx, TrainingStage.AFTER_OPTIMIZER_STEP, skipped)
        if self._outcome is not None and not self._outcome.window_open:
            for child in self._settling:
                self._at_work = child
                child.settled(ctx, skipped=skipped)

    # What happened, and what would.

    @property
    def optimizer_step_skipped(self) -> bool:
        """Whether no optimizer stepped at the latest optimizer-step stage; False before the first."""
        return self._outcome is not None and self._outcome.skipped

    @property
    def last_outcome(self) -> StepOutcome | None:
        """Who vetoed and why, and which optimizer stepped, at the latest optimizer-step stage; None before it."""
        return self._outcome

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
        return explain_hooks(ordered, self._priorities, self._outcome)

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

    def __getstate__(self) -> dict[str, Any]:
        """Leave the window out: gradients are not carried to another process."""
        return {**self.__dict__, "_window": None}

    def __enter__(self) -> Self:
        self._lifecycle.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lifecycle.close(error, traceback)

    def close(self) -> None:
        """Close every child that can be closed, in reverse order; twice is harmless."""
        self._lifecycle.close()

    # Inside.

    def _overriding(self, method: str) -> tuple[TrainingUpdateHook, ...]:
        """Return the children for which a stage does anything; calling the others would change nothing."""
        return tuple(child for child in self._children if overrides(child, method) or overrides(child, "__call__"))

    def _priority(self, hook: TrainingUpdateHook) -> int:
        return self._priorities.get(hook.state_key, hook.priority)

    def _call(
        self, child: TrainingUpdateHook, ctx: TrainContext, stage: TrainingStage, will_skip: bool
    ) -> tuple[bool, Tensor | None]:
        self._at_work = child
        if ctx.window is not None:
            ctx.window.begin(child)
        answer = child(ctx, stage, will_skip)
        if not (isinstance(answer, tuple) and len(answer) == 2) and stage not in _ANSWER_IGNORED:
            raise HookContractError(
                f"{type(child).__name__} returned {answer!r} at {stage.name}; __call__ returns (proceed, loss)."
            )
        if stage not in _GATED:
            self._at_work = None
        return answer

    def _proceeds(self, child: TrainingUpdateHook, ctx: TrainContext, stage: TrainingStage, will_skip: bool) -> bool:
        proceed, _ = self._call(child, ctx, stage, will_skip)
        if type(proceed) is not bool:
            raise HookContractError(
                f"{type(child).__name__} returned {proceed!r} ({type(proceed).__name__}) at {stage.name}; whether to "
                "proceed is True or False, a real bool. For a decision that is still a tensor use ctx.defer_veto."
            )
        self._at_work = None
        return proceed

    def _current(self, ctx: TrainContext) -> UpdateWindow:
        if self._window is None or self._window.closed:
            self._open_window(ctx)
        assert self._window is not None
        ctx.window = self._window
        return self._window

    def _open_window(self, ctx: TrainContext) -> None:
        if self._window is not None:
            if self._window.unscaled:
                self._window.close(None)  # an exception left it half-way; torch's scaler would refuse the next one
            self._window.release()
        for optimizer in ctx.optimizers:
            refuse_closure(type(optimizer))
        ctx.window = self._window = UpdateWindow(ctx.optimizers, ctx.grad_scaler)


def _refuse_mixed_scales(window: UpdateWindow | None) -> None:
    if window is not None and window.unscaled:
        raise HookContractError(
            "Gradients were to be kept at BEFORE_BATCH although their loss scale is divided out already, so the next "
            "backward pass would add scaled gradients to true ones; a hook that accumulates sets "
            "ctx.window_complete = False for as long as it wants to keep gradients."
        )


def _differentiable(loss: object, what: str) -> Tensor:
    if not isinstance(loss, Tensor):
        raise HookContractError(f"DO_BACKWARD needs a loss to differentiate, but {what} is {loss!r}; give a tensor.")
    if not loss.requires_grad:
        raise HookContractError(
            f"DO_BACKWARD needs a loss to differentiate, but {what} has no graph (requires_grad is False); "
            "do not detach it, compute it from parameters that require gradients, and call DO_BACKWARD once a batch."
        )
    if loss.numel() != 1:
        raise HookContractError(
            f"DO_BACKWARD needs a scalar to differentiate, but {what} has shape {tuple(loss.shape)}; "
            "take its mean or sum."
        )
    return loss


def _checked(hook: object, position: int) -> TrainingUpdateHook:
    if isinstance(hook, TrainingUpdateHook):
        return hook
    advice = "compose update hooks: subclasses of TrainingUpdateHook"
    if isinstance(hook, list | tuple):
        advice = "unpack it: TrainingUpdateOrchestrator(*hooks)"
    elif isinstance(hook, type) and issubclass(hook, TrainingUpdateHook):
        advice = f"make an instance: {hook.__name__}(...)"
    elif hasattr(hook, "frequency"):
        advice = "it is a plain hook; give it to the strategy beside the orchestrator, or call it yourself"
    elif isinstance(hook, str):
        advice = "names are for a strategy, TrainingStrategy(hooks=[...]); here give the hook itself"
    kind = f"the class {hook.__name__}" if isinstance(hook, type) else f"a {type(hook).__name__}"
    raise TypeError(f"Argument {position} of TrainingUpdateOrchestrator is {kind}, no update hook; {advice}.")


def _refuse_conflicts(hooks: list[TrainingUpdateHook]) -> None:
    for place, hook in enumerate(hooks):
        for other in hooks[:place]:
            names = f"{type(other).__name__} and {type(hook).__name__}"
            if hook is other:
                raise HookConflictError(f"The same {type(hook).__name__} was given twice; give each instance once.")
            if hook.exclusive_family is not None and hook.exclusive_family == other.exclusive_family:
                raise HookConflictError(
                    f"{names} both belong to the family {hook.exclusive_family!r}, of which one can be active; "
                    "leave one of them out."
                )
            if hook.state_key == other.state_key:
                raise HookConflictError(
                    f"{names} cannot be told apart: both have the state key {hook.state_key!r}; "
                    "give them labels, hook.labelled('...'), or different settings."
                )


def _checked_priorities(priorities: Mapping[str, int], hooks: list[TrainingUpdateHook]) -> Mapping[str, int]:
    keys = [hook.state_key for hook in hooks]
    for key, priority in priorities.items():
        if key not in keys:
            closest = difflib.get_close_matches(key, keys, n=1, cutoff=0.0)
            hint = f"did you mean {closest[0]!r}?" if closest else "no hooks are composed."
            raise HookConflictError(f"A priority is given for {key!r}, but no hook has that state key; {hint}")
        if type(priority) is not int:
            raise HookConflictError(f"The priority of {key!r} is {priority!r}; it must be an int.")
    return priorities
