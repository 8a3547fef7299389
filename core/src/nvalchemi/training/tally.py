"""Counting what became of the batches of a pass, so that a run in which nothing moves can say why."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvalchemi.hooks.context import TrainContext

__all__ = ["Tally"]


class Tally:
    """What became of the batches of one pass."""

    def __init__(self) -> None:
        self.batches = self.open_windows = 0
        self._vetoes = Counter[str]()

    def count(self, ctx: TrainContext) -> None:
        """Count one batch."""
        self.batches += 1
        if ctx.outcome is not None:
            self.open_windows += ctx.outcome.window_open
            self._vetoes.update(f"{veto.hook} ({veto.reason})" for veto in ctx.outcome.vetoes)

    def no_progress(self) -> str:
        """Say why nothing was trained."""
        causes = [f"vetoed by {name} {count} times" for name, count in self._vetoes.most_common()]
        if self.open_windows:
            causes.append(
                f"the window was still open after {self.open_windows} of them: "
                "accumulate over fewer batches than a pass has"
            )
        if not causes:
            causes.append("no hook vetoed: no optimizer had a gradient, or every gradient was not finite")
        return (
            f"A whole pass over the loader ({self.batches} batches) went by without one optimizer step: "
            f"{'; '.join(causes)}. Look at the loss and the gradients of the first batches; "
            "a lower learning rate or loss scale often helps."
        )
