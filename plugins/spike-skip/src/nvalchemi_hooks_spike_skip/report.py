"""What was left out: a list that a person can read afterwards."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["Skip", "SkipReport"]

_KEPT = 100


class Skip(NamedTuple):
    """One number that held back a step.

    Attributes
    ----------
    step : int
        Steps that were taken before.
    epoch, batch : int
        Where it was; batches are counted over all epochs, from 0.
    watched : str
        ``"loss"`` or ``"grad_norm"``.
    value, limit, median : float
        What it was, the most it could have been, and what was usual. The median is nan before any step was taken, the
        limit inf where nothing but inf and nan was refused.
    """

    step: int
    epoch: int
    batch: int
    watched: str
    value: float
    limit: float
    median: float

    def __str__(self) -> str:
        what = {"loss": "loss", "grad_norm": "gradient norm"}[self.watched]
        why = f"above {self.limit:.4g}; usual {self.median:.4g}" if math.isfinite(self.value) else "not finite"
        return f"step {self.step} (epoch {self.epoch}, batch {self.batch}): {what} {self.value:.4g}, {why}"


class SkipReport:
    """The latest skips, one line each; the latest 100 are kept.

    Examples
    --------
    >>> report = SkipReport()
    >>> report.add(Skip(7, 0, 9, "loss", 41.0, 2.5, 1.25))
    >>> print(report)
    step 7 (epoch 0, batch 9): loss 41, above 2.5; usual 1.25
    """

    def __init__(self, skips: Iterable[Sequence[float | str]] = ()) -> None:
        self._skips = deque((Skip(*skip) for skip in skips), maxlen=_KEPT)  # type: ignore[arg-type]  # as they were

    @property
    def skips(self) -> tuple[Skip, ...]:
        """The skips, the latest last."""
        return tuple(self._skips)

    def add(self, skip: Skip) -> None:
        """Add one; the oldest is forgotten if there are too many."""
        self._skips.append(skip)

    def __str__(self) -> str:
        return "\n".join(map(str, self._skips))
