"""What goes wrong in accumulation."""

from __future__ import annotations

from .loop import Loop

__all__ = [
    "AveragesMeans",
    "DropsTheLastWindow",
    "SchedulesEveryMicroBatch",
    "SilencesTheBackwardPassOnly",
    "SavesItsOwnShard",
]


class DropsTheLastWindow(Loop):
    """The step comes when the count of batches divides by the length of a window; what is left over is lost."""

    def epoch(self, batches):
        for batch in batches:
            self.step(batch)
        self.in_window = 0


class SchedulesEveryMicroBatch(Loop):
    """The scheduler moves with every batch of a window, and its schedule is over too soon."""

    def stepped(self):
        self.steps += 1

    def after_batch(self):
        for scheduler in self.schedulers:
            scheduler.step()


class AveragesMeans(Loop):
    """Means over batches of different sizes are averaged as if the batches were equal."""

    def share(self, batch):
        return 1.0


class SilencesTheBackwardPassOnly:
    """Reduction is switched off around the backward pass, when the forward pass has decided on it already."""

    job = "accumulated_naively"


class SavesItsOwnShard:
    """The average of a sharded model is a copy of what this rank holds, and is saved as if it were all."""

    job = "sharded_naively"
