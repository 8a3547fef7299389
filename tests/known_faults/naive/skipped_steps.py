"""What goes wrong when a step is skipped."""

from __future__ import annotations

from .loop import Loop, parameters_of

__all__ = [
    "ClosesNoWindowAfterAVeto",
    "CountsBatchesAsSteps",
    "KeepsGradientsAfterASkip",
    "SchedulesEveryBatch",
    "StepsWithoutGradients",
]


class SchedulesEveryBatch(Loop):
    """The learning rate moves at the end of every batch, with a step or without."""

    def stepped(self):
        self.steps += 1

    def after_batch(self):
        for scheduler in self.schedulers:
            scheduler.step()


class CountsBatchesAsSteps(Loop):
    """Nobody tells the rest of the loop of a veto: every batch counts as a step and moves the average."""

    def skipped(self):
        self.stepped()


class KeepsGradientsAfterASkip(Loop):
    """Gradients are cleared after a step, so those of a skipped one stay and each backward pass adds to them."""

    def forget(self):
        pass

    def stepped(self):
        super().stepped()
        super().forget()


class ClosesNoWindowAfterAVeto(Loop):
    """A veto leaves the function after unscaling, and with it the update of the scaler."""

    def close_scaler(self, keep):
        if keep is None:
            self.scaler.update()


class StepsWithoutGradients(Loop):
    """Every optimizer is stepped through the scaler, also one that the loss does not reach."""

    def attempt(self):
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        return any(parameter.grad is not None for parameter in parameters_of(self.optimizers[0]))
