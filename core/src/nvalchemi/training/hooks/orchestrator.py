"""Composing update hooks: one order, one backward, one step that all of them agree to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from nvalchemi.errors import HookConflictError, HookContractError, add_hook_note
from nvalchemi.hooks.lifecycle import HookLifecycle, close_all
from nvalchemi.hooks.protocols import CheckpointableHook, ProvidesExecutor
from nvalchemi.training.closures import refuse_closure
from nvalchemi.training.hooks.composition import checked_hook, checked_priorities, refuse_conflicts
from nvalchemi.training.hooks.differentiable import differentiable
from nvalchemi.training.hooks.executor import StockExecutor
from nvalchemi.training.hooks.explanation import Explanation, explain_hooks
from nvalchemi.training.hooks.members import Roster
from nvalchemi.training.hooks.pending import PendingStep
from nvalchemi.training.hooks.stepping import StepOutcome, Waiting, attempt_step, attempt_without_waiting
from nvalchemi.training.hooks.update import TrainingUpdateHook, overrides, takes_part_in_step
from nvalchemi.training.hooks.window import UpdateWindow
from nvalchemi.training.stages import TrainingStage

if TYPE_CHECKING:
    from nvalchemi.hooks.context import TrainContext

__all__ = ["TrainingUpdateOrchestrator"]

_SKIPPED = StepOutcome(skipped=True)
_OPEN = StepOutcome(skipped=True, window_open=True)


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
        self._calls = self._handlers()
        self._setting_up = self._overriding("setup")
        self._before = self._overriding("before_batch")
        self._transforming = self._overriding("transform_loss")
        deciding = set(map(id, self._overriding("before_optimizer_step")))
        self._voting = tuple((child, id(child) in deciding) for child in self._children if takes_part_in_step(child))
        self._whole = frozenset(id(child) for child in self._children if overrides(child, "__call__"))
        self._after = self._overriding("after_optimizer_step")
        self._settling = tuple(child for child in self._children if overrides(child, "settled"))
        self._at_work: TrainingUpdateHook | None = None
        self._lifecycle = HookLifecycle(self.iter_hooks)
        self._window: UpdateWindow | None = None
        self._outcome: StepOutcome | None = None
        self._pending: PendingStep | None = None
        self._executors = tuple(c.update_executor() for c in self._children if isinstance(c, ProvidesExecutor))
        self._stock, self._roster = StockExecutor(), Roster()

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
            if self._begin(child, ctx):
                child(ctx, TrainingStage.SETUP, False)
            else:
                child.setup(ctx)

    def _before_batch(self, ctx: TrainContext) -> None:
        ctx.step_skipped, ctx.outcome = False, None
        if ctx.pending is None:
            ctx.pending = self._pending
        before = self._window
        window = self._current(ctx)
        window.begun &= window is before
        vetoed = False
        for child in self._before:
            if self._begin(child, ctx):
                proceed = _proceed_of(child, child(ctx, TrainingStage.BEFORE_BATCH, vetoed), TrainingStage.BEFORE_BATCH)
            else:
                proceed = child.before_batch(ctx, will_skip=vetoed)
            vetoed |= proceed is not True and not _a_bool(child, proceed, TrainingStage.BEFORE_BATCH)
        self._at_work = None
        keep = vetoed or (self._outcome is not None and self._outcome.window_open)
        if keep:
            self.resolve()  # it says whether gradients are still scaled
            _refuse_mixed_scales(before)
        else:
            _forget_gradients(ctx.untouched_optimizers)
        if not window.begun:
            window.adopt(ctx.untouched_optimizers, ctx.grad_scaler)  # a child may have published a scaler
        elif not keep:
            self._open_window(ctx)

    def _backward(self, ctx: TrainContext) -> None:
        original, loss = ctx.loss, ctx.loss
        try:
            for child in self._transforming:
                ctx.loss = differentiable(loss, "the loss that was given")
                if self._begin(child, ctx):
                    _, loss = _pair(child, child(ctx, TrainingStage.DO_BACKWARD, False), TrainingStage.DO_BACKWARD)
                else:
                    loss = child.transform_loss(ctx, ctx.loss)
                self._at_work = None
                loss = differentiable(loss, f"what {type(child).__name__} returned at DO_BACKWARD")
            differentiable(loss, "the loss that was given").backward()  # type: ignore[no-untyped-call]
        finally:
            ctx.loss = original
            ctx.let_go_of_graph()
        window = self._current(ctx)
        window.follow(ctx.grad_scaler)
        window.refresh()

    def _optimizer_step(self, ctx: TrainContext) -> None:
        self.resolve()
        ctx.pending = None
        window = self._current(ctx)
        self._outcome, ctx.step_skipped = _SKIPPED, True  # what holds if anything below raises
        window.follow(ctx.grad_scaler)
        if not ctx.window_complete:
            for child, _ in self._voting:
                if id(child) in self._whole:
                    self._vote_of(child, ctx, True)
            self._conclude(ctx, _OPEN)
            return
        self._vote(ctx, window)
        outcome = attempt_without_waiting(ctx, window) if self.lazy else attempt_step(ctx, window)
        if isinstance(outcome, Waiting):
            ctx.pending = self._pending = pending = PendingStep(ctx, window, outcome, self.resolve)
            window.await_outcome(outcome.veto_flag, pending.resolve)
        else:
            self._conclude(ctx, outcome)

    def _vote(self, ctx: TrainContext, window: UpdateWindow) -> None:
        window.begin_voting()
        for child, decides in self._voting:
            reads = child.reads_grad
            if decides and not child.defers_veto:
                window.resolve()
            if reads:
                window.materialise()
            if decides and self._vote_of(child, ctx, bool(window.decision.vetoes)) is not True:
                window.veto(child)
            if reads:
                window.reread()
        window.voting, self._at_work = False, None

    def _vote_of(self, child: TrainingUpdateHook, ctx: TrainContext, will_skip: bool) -> bool:
        if self._begin(child, ctx):
            stage = TrainingStage.DO_OPTIMIZER_STEP
            proceed = _proceed_of(child, child(ctx, stage, will_skip), stage)
        else:
            proceed = child.before_optimizer_step(ctx, will_skip=will_skip)
        return proceed is True or _a_bool(child, proceed, TrainingStage.DO_OPTIMIZER_STEP)

    def _after_optimizer_step(self, ctx: TrainContext) -> None:
        try:
            for child in self._after:
                if not child.defers_veto:
                    self.resolve()
                skipped = self._pending is None and self._outcome is not None and self._outcome.skipped
                if self._begin(child, ctx):
                    child(ctx, TrainingStage.AFTER_OPTIMIZER_STEP, skipped)
                else:
                    child.after_optimizer_step(ctx, skipped=skipped)
        finally:  # the step was taken, and is counted whatever a child says to it
            if self._pending is not None:
                self._pending.announced = True
            elif self._outcome is not None and not self._outcome.window_open:
                self._settle(ctx, self._outcome)

    def _conclude(self, ctx: TrainContext, outcome: StepOutcome) -> None:
        self._outcome = ctx.outcome = outcome
        ctx.step_skipped = outcome.skipped

    def _settle(self, ctx: TrainContext, outcome: StepOutcome) -> None:
        for child in self._settling:
            try:
                child.settled(ctx, skipped=outcome.skipped)
            except Exception as error:  # noted and raised again
                add_hook_note(error, child, TrainingStage.AFTER_OPTIMIZER_STEP, ctx)
                self._at_work = None  # so that it is not blamed on whoever asked
                raise

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
        pending, self._pending = self._pending, None
        if pending is not None:
            outcome = pending.finish()
            self._conclude(pending.ctx, outcome)
            try:
                if pending.announced:
                    with pending.as_it_was() as ctx:
                        self._settle(ctx, outcome)
            finally:
                pending.tell()
        return self._outcome

    @property
    def pending(self) -> PendingStep | None:
        """The step whose outcome the host has not asked for yet, in lazy mode."""
        return self._pending

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

    def go_on(self, *, window_open: bool) -> None:
        """Go on from a run that was loaded: what happened here before is left behind.

        Parameters
        ----------
        window_open : bool
            Gradients were loaded, too, and the window they belong to goes on: the next batch adds to them.
        """
        self.resolve()
        if self._window is not None and self._window.unscaled:
            self._window.close(None)  # torch's scaler would refuse the next one
        self._window, self._outcome = None, _OPEN if window_open else None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the window out: gradients are not carried to another process."""
        self.resolve()
        return {**self.__dict__, "_window": None}

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

    def _overriding(self, method: str) -> tuple[TrainingUpdateHook, ...]:
        """Return the children for which a stage does anything; calling the others would change nothing."""
        return tuple(child for child in self._children if overrides(child, method) or overrides(child, "__call__"))

    def _wants_to_know(self, child: TrainingUpdateHook) -> bool:
        """Return whether a child may act on how the step before ended, and does not know of deferred vetoes."""
        return not child.defers_veto and (takes_part_in_step(child) or overrides(child, "settled"))

    def _priority(self, hook: TrainingUpdateHook) -> int:
        return self._priorities.get(hook.state_key, hook.priority)

    def _begin(self, child: TrainingUpdateHook, ctx: TrainContext) -> bool:
        """Note who is at work, and return whether it is called as a whole instead of by the method of the stage."""
        if self._pending is not None and self._pending.ctx is not ctx and self._wants_to_know(child):
            self.resolve()
        self._at_work = child
        if (window := ctx.window) is not None:
            window.at_work, window.noted = child, None
        return id(child) in self._whole

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
        optimizers = ctx.untouched_optimizers
        for optimizer in optimizers:
            refuse_closure(type(optimizer))
        ctx.window = self._window = UpdateWindow(
            optimizers, ctx.grad_scaler, self._executors, self._stock, self._roster
        )


def _refuse_mixed_scales(window: UpdateWindow | None) -> None:
    if window is not None and window.unscaled:
        raise HookContractError(
            "Gradients were to be kept at BEFORE_BATCH although their loss scale is divided out already, so the next "
            "backward pass would add scaled gradients to true ones; a hook that accumulates sets "
            "ctx.window_complete = False for as long as it wants to keep gradients."
        )


def _forget_gradients(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Set gradients to None, as ``zero_grad`` does; one that does more is called."""
    for optimizer in optimizers:
        if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad or "zero_grad" in vars(optimizer):
            optimizer.zero_grad(set_to_none=True)
            continue
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def _pair(hook: TrainingUpdateHook, answer: object, stage: TrainingStage) -> tuple[Any, Any]:
    if not (isinstance(answer, tuple) and len(answer) == 2):
        raise HookContractError(
            f"{type(hook).__name__} returned {answer!r} at {stage.name}; __call__ returns (proceed, loss)."
        )
    return answer


def _proceed_of(hook: TrainingUpdateHook, answer: object, stage: TrainingStage) -> object:
    return _pair(hook, answer, stage)[0]


def _a_bool(hook: TrainingUpdateHook, proceed: object, stage: TrainingStage) -> bool:
    if type(proceed) is not bool:
        raise HookContractError(
            f"{type(hook).__name__} returned {proceed!r} ({type(proceed).__name__}) at {stage.name}; whether to "
            "proceed is True or False, a real bool. For a decision that is still a tensor use ctx.defer_veto."
        )
    if not proceed and not hook.may_veto:
        raise HookContractError(
            f"{type(hook).__name__} vetoed at {stage.name}, although its may_veto is False; leave may_veto out, or "
            "return True."
        )
    return proceed
