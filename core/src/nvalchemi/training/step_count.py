"""Counting executed steps, of which the latest may be one whose outcome the host does not know yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvalchemi.training.arguments import world_size

if TYPE_CHECKING:
    from nvalchemi.hooks.context import TrainContext
    from nvalchemi.training.hooks.pending import PendingStep

__all__ = ["StepCount"]


class StepCount:
    """Executed optimizer steps: of this process, and over all ranks.

    Questions are answered without the outcome of a pending step where it makes no difference.

    Attributes
    ----------
    known, known_globally : int
        The counts without a pending step.

    Examples
    --------
    >>> count = StepCount()
    >>> count.add(1)
    >>> count.reached(1), count.exact()
    (True, 1)
    """

    def __init__(self) -> None:
        self.known = self.known_globally = 0
        self._pending: PendingStep | None = None
        self._behind: list[TrainContext] = []  # contexts whose counts wait for the pending step

    def exact(self) -> int:
        """Return the count, once a pending step is resolved."""
        if self._pending is not None:
            self._pending.resolve()
        return self.known

    def reached(self, goal: int) -> bool:
        """Return whether the count is at least `goal`."""
        undecided = self._pending is not None and self.known + 1 == goal
        return (self.exact() if undecided else self.known) >= goal

    def may_be_multiple_of(self, every: int) -> bool:
        """Return whether the count is a multiple of `every`, or a pending step could make it one."""
        return self.known % every == 0 or (self._pending is not None and (self.known + 1) % every == 0)

    def add(self, steps: int) -> None:
        """Count steps that were taken."""
        self.known += steps
        self.known_globally += steps * world_size()

    def count(self, ctx: TrainContext) -> None:
        """Count the step of a batch and tell its context, now or once it is known whether it was taken."""
        if ctx.pending is None:
            self._count(ctx)
            return
        self._pending = ctx.pending
        self.tell(ctx)
        ctx.when_resolved(self._count)

    def tell(self, ctx: TrainContext) -> None:
        """Write the counts into a context, now or once they are known."""
        ctx.step_count, ctx.global_step_count = self.known, self.known_globally
        if self._pending is not None:
            ctx.pending = self._pending
            self._pending.count_for(ctx)
            self._behind.append(ctx)

    def _count(self, ctx: TrainContext) -> None:
        self._pending = None
        self.add(not ctx.step_skipped)
        for one in (ctx, *self._behind):
            self.tell(one)
        self._behind.clear()
