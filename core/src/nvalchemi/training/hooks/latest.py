"""What the latest optimizer step came to: known, or on its way to the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvalchemi.errors import add_hook_note
from nvalchemi.training.stages import TrainingStage

if TYPE_CHECKING:
    from nvalchemi.hooks.context import TrainContext
    from nvalchemi.training.hooks.pending import PendingStep
    from nvalchemi.training.hooks.stepping import StepOutcome
    from nvalchemi.training.hooks.update import TrainingUpdateHook

__all__ = ["LatestStep"]


class LatestStep:
    """The latest step of a composition, and the hooks that are told what became of it.

    Parameters
    ----------
    listeners : tuple of TrainingUpdateHook
        Whose ``settled`` is called, once a window.

    Attributes
    ----------
    outcome : StepOutcome or None
        Of the latest step that the host knows.
    pending : PendingStep or None
        The step whose outcome it does not know yet.
    """

    def __init__(self, listeners: tuple[TrainingUpdateHook, ...]) -> None:
        self.outcome: StepOutcome | None = None
        self.pending: PendingStep | None = None
        self._listeners = listeners

    def resolve(self) -> StepOutcome | None:
        """Return the outcome, waiting for it if it is pending; None before the first step."""
        pending, self.pending = self.pending, None
        if pending is not None:
            outcome = pending.finish()
            self.conclude(pending.ctx, outcome)
            try:
                if pending.announced:
                    pending.tell_as_it_was(self._settle, outcome)
            finally:
                pending.tell()
        return self.outcome

    def conclude(self, ctx: TrainContext, outcome: StepOutcome) -> None:
        """Note the outcome, here and in the context of its batch."""
        self.outcome = ctx.outcome = outcome
        ctx.step_skipped = outcome.skipped

    def announce(self, ctx: TrainContext) -> None:
        """Tell the listeners how the window has ended, at once or as soon as the host knows."""
        if self.pending is not None:
            self.pending.announced = True
        elif self.outcome is not None and not self.outcome.window_open:
            self._settle(ctx, self.outcome)

    def _settle(self, ctx: TrainContext, outcome: StepOutcome) -> None:
        for hook in self._listeners:
            try:
                hook.settled(ctx, skipped=outcome.skipped)
            except Exception as error:  # noted, so that it is not blamed on whoever asked, and raised again
                add_hook_note(error, hook, TrainingStage.AFTER_OPTIMIZER_STEP, ctx)
                raise
