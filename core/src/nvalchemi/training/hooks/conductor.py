"""What a composition of hooks does at each stage of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nvalchemi.hooks.protocols import ProvidesExecutor
from nvalchemi.training.closures import refuse_closure
from nvalchemi.training.hooks.answers import checked_pair, checked_proceed
from nvalchemi.training.hooks.carrying_out import Carrier
from nvalchemi.training.hooks.deferring import Turn
from nvalchemi.training.hooks.differentiable import differentiable
from nvalchemi.training.hooks.latest import LatestStep
from nvalchemi.training.hooks.members import Roster
from nvalchemi.training.hooks.parts import Parts
from nvalchemi.training.hooks.pending import PendingStep
from nvalchemi.training.hooks.ranks import Ranks
from nvalchemi.training.hooks.stepping import StepOutcome, Waiting, attempt_step, attempt_without_waiting
from nvalchemi.training.hooks.update import TrainingUpdateHook
from nvalchemi.training.hooks.window import UpdateWindow
from nvalchemi.training.hooks.zeroing import forget_gradients, refuse_mixed_scales
from nvalchemi.training.stages import TrainingStage

if TYPE_CHECKING:
    from nvalchemi.hooks.context import TrainContext

__all__ = ["Conductor"]

_SKIPPED = StepOutcome(skipped=True)
_OPEN = StepOutcome(skipped=True, window_open=True)


class Conductor:
    """Leads hooks through the stages of a batch, from window to window.

    Parameters
    ----------
    hooks : sequence of TrainingUpdateHook
        In the order in which they act.
    lazy : bool
        Do not wait for the device at the step.

    Attributes
    ----------
    turn : Turn
        Whose method is being called.
    latest : LatestStep
        What the latest step came to.
    """

    def __init__(self, hooks: Sequence[TrainingUpdateHook], *, lazy: bool) -> None:
        self.turn = Turn()
        self._lazy = lazy
        self._parts = Parts(hooks)
        self.latest = LatestStep(self._parts.settled)
        self._window: UpdateWindow | None = None
        self._torn = False  # from a backward pass on, until the step stage: an error in between leaves it so
        self._carrier = Carrier([hook.update_executor() for hook in hooks if isinstance(hook, ProvidesExecutor)])
        self._roster = Roster()
        self._ranks = Ranks(self._parts.voting)

    def stages(self) -> dict[TrainingStage, Callable[[TrainContext], None]]:
        """Return what is to be called at which stage."""
        return {
            TrainingStage.SETUP: self.setup,
            TrainingStage.BEFORE_BATCH: self.before_batch,
            TrainingStage.DO_BACKWARD: self.backward,
            TrainingStage.DO_OPTIMIZER_STEP: self.optimizer_step,
            TrainingStage.AFTER_OPTIMIZER_STEP: self.after_optimizer_step,
        }

    def setup(self, ctx: TrainContext) -> None:
        """Have every hook prepare."""
        for optimizer in ctx.optimizers:
            refuse_closure(type(optimizer))
        waiting = self.latest.pending is not None and self._awaits_earlier(ctx)
        for hook, whole, concerned in self._parts.setup:
            if waiting and concerned and not hook.defers_veto:
                self.latest.resolve()
            self.turn.hook = hook
            if whole:
                hook(ctx, TrainingStage.SETUP, False)
            else:
                hook.setup(ctx)

    def before_batch(self, ctx: TrainContext) -> None:
        """Zero gradients, unless a hook vetoes or the window is open."""
        ctx.step_skipped, ctx.outcome = False, None
        if ctx.pending is None:
            ctx.pending = self.latest.pending
        before = self._window
        window = self._current(ctx)
        window.begun &= window is before
        earlier = len(window.shared)
        vetoed, turn = False, self.turn
        waiting = self.latest.pending is not None and self._awaits_earlier(ctx)
        for hook, whole, concerned in self._parts.before_batch:
            if waiting and concerned and not hook.defers_veto:
                self.latest.resolve()
            turn.hook = hook
            if whole:
                proceed, _ = checked_pair(
                    hook, hook(ctx, TrainingStage.BEFORE_BATCH, vetoed), TrainingStage.BEFORE_BATCH
                )
            else:
                proceed = hook.before_batch(ctx, will_skip=vetoed)
            vetoed |= proceed is not True and not checked_proceed(hook, proceed, TrainingStage.BEFORE_BATCH)
        turn.hook = None
        optimizers = ctx.untouched_optimizers
        is_open = self.latest.outcome is not None and self.latest.outcome.window_open and not self._torn
        keep = vetoed or is_open
        if keep:
            self.latest.resolve()  # it says whether gradients are still scaled
            refuse_mixed_scales(before)
        else:
            forget_gradients(optimizers)
        if not window.begun:
            window.adopt(optimizers, ctx.grad_scaler)  # a hook may have published a scaler
        elif not keep:
            shared = window.shared[earlier:]
            self._open_window(ctx).shared = shared

    def backward(self, ctx: TrainContext) -> None:
        """Let each hook transform the loss that its predecessor returned, and run ``backward()`` on the last."""
        self._torn = True
        original, turn = ctx.loss, self.turn
        waiting = self.latest.pending is not None and self._awaits_earlier(ctx)
        window = self._current(ctx)
        window.raw_loss = original
        try:
            loss = differentiable(original)
            for hook, whole, concerned in self._parts.transform_loss:
                ctx.loss = loss
                if waiting and concerned and not hook.defers_veto:
                    self.latest.resolve()
                turn.hook = hook
                if whole:
                    answer = hook(ctx, TrainingStage.DO_BACKWARD, False)
                    _, loss = checked_pair(hook, answer, TrainingStage.DO_BACKWARD)
                else:
                    loss = hook.transform_loss(ctx, loss)
                turn.hook = None
                loss = differentiable(loss, hook)
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            ctx.loss, window.raw_loss = original, None
            ctx.let_go_of_graph()
        window.follow(ctx.grad_scaler)
        window.refresh()

    def optimizer_step(self, ctx: TrainContext) -> None:
        """Ask every hook, and step the optimizers if none vetoes."""
        self._torn = False
        latest = self.latest
        latest.resolve()
        ctx.pending = None
        window = self._current(ctx)
        latest.outcome, ctx.step_skipped = _SKIPPED, True  # what holds if anything below raises
        window.follow(ctx.grad_scaler)
        if not ctx.window_complete:
            for hook, whole, _ in self._parts.voting:
                if whole:
                    self._ask_whole(hook, ctx, True)
            latest.conclude(ctx, _OPEN)
            return
        self._vote(ctx, window)
        outcome = attempt_without_waiting(ctx, window) if self._lazy else attempt_step(ctx, window)
        if isinstance(outcome, Waiting):
            ctx.pending = latest.pending = pending = PendingStep(ctx, window, outcome, latest.resolve)
            window.await_outcome(outcome.veto_flag, pending.resolve)
        else:
            latest.conclude(ctx, outcome)

    def after_optimizer_step(self, ctx: TrainContext) -> None:
        """Tell every hook that the step was taken or skipped, and then what is settled."""
        latest, turn = self.latest, self.turn
        try:
            for hook, whole, _ in self._parts.after_optimizer_step:
                if not hook.defers_veto:
                    latest.resolve()
                skipped = latest.pending is None and latest.outcome is not None and latest.outcome.skipped
                turn.hook = hook
                if whole:
                    hook(ctx, TrainingStage.AFTER_OPTIMIZER_STEP, skipped)
                else:
                    hook.after_optimizer_step(ctx, skipped=skipped)
        finally:
            latest.announce(ctx)  # the step was taken, and is counted whatever a hook says to it

    def go_on(self, *, window_open: bool) -> None:
        """Leave behind what happened, and go on from a loaded run whose window may be open."""
        self.latest.resolve()
        self._let_go()
        self._window, self.latest.outcome = None, _OPEN if window_open else None
        self._torn = False

    def __getstate__(self) -> dict[str, Any]:
        """Leave the window out: gradients are not carried to another process."""
        return {**self.__dict__, "_window": None}

    # Inside.

    def _vote(self, ctx: TrainContext, window: UpdateWindow) -> None:
        window.begin_voting()
        window.ranks = ranks = self._ranks.exchange(ctx, window)
        vetoes, turn = window.decision.vetoes, self.turn
        for hook, whole, decides in self._parts.voting:
            reads = hook.reads_grad
            if decides and not hook.defers_veto:
                window.resolve()
            if reads:
                window.materialise()
            if decides:
                turn.hook = hook
                if whole:
                    proceed = self._ask_whole(hook, ctx, bool(vetoes))
                else:
                    proceed = hook.before_optimizer_step(ctx, will_skip=bool(vetoes))
                if proceed is not True and not checked_proceed(hook, proceed, TrainingStage.DO_OPTIMIZER_STEP):
                    window.veto(hook)
            if reads:
                window.reread()
        window.voting, turn.hook = False, None
        if ranks is not None:
            ranks.close()

    def _ask_whole(self, hook: TrainingUpdateHook, ctx: TrainContext, will_skip: bool) -> bool:
        """Ask a hook that overrides ``__call__`` whether to step."""
        stage = TrainingStage.DO_OPTIMIZER_STEP
        self.turn.hook = hook
        proceed, _ = checked_pair(hook, hook(ctx, stage, will_skip), stage)
        return checked_proceed(hook, proceed, stage)

    def _awaits_earlier(self, ctx: TrainContext) -> bool:
        """Return whether the step of an earlier batch is pending, of which some hooks have to be told first."""
        pending = self.latest.pending
        return pending is not None and pending.ctx is not ctx

    def _current(self, ctx: TrainContext) -> UpdateWindow:
        if self._window is None or self._window.closed:
            return self._open_window(ctx)
        ctx.window = self._window
        return self._window

    def _let_go(self) -> None:
        if self._window is not None:
            if self._window.unscaled and not self._window.closed:
                self._window.close(None)  # an exception left it half-way; torch's scaler would refuse the next one
            self._window.release()

    def _open_window(self, ctx: TrainContext) -> UpdateWindow:
        self._let_go()
        optimizers = ctx.untouched_optimizers
        for optimizer in optimizers:
            refuse_closure(type(optimizer))
        ctx.window = self._window = window = UpdateWindow(
            optimizers, ctx.grad_scaler, self._carrier, self._roster, self.turn
        )
        return window
