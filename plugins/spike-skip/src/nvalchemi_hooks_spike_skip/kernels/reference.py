"""The rule, literally: median and median absolute deviation of all values, sorted anew for every question."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

__all__ = ["limit"]


def limit(history: Sequence[float], threshold: float, min_ratio: float, *, logarithmic: bool) -> float:
    """Return the largest value that does not stand out from `history`.

    With ``y`` the values, or their logarithms, ``m = median(y)`` and ``s = 1.4826 median(|y - m|)``:

    * ``exp(m + max(threshold s, log min_ratio))`` of logarithms,
    * ``m + max(threshold s, (min_ratio - 1) |m|)`` of the values themselves,

    and inf where there is neither spread nor ratio to judge by.
    """
    seen = [math.log(value) for value in history] if logarithmic else list(history)
    median = statistics.median(seen)
    spread = 1.4826 * statistics.median([abs(value - median) for value in seen])
    if logarithmic:
        above = max(threshold * spread, math.log(min_ratio))
    else:
        above = max(threshold * spread, (min_ratio - 1.0) * abs(median))
    if above == 0.0:
        return math.inf
    try:
        return math.exp(median + above) if logarithmic else median + above
    except OverflowError:  # of exp
        return math.inf
