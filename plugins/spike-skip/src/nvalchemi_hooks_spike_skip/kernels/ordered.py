"""The rule, on values that are kept in order of size: a new one costs a search, and so does its limit."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence

__all__ = ["History"]

_TO_SIGMA = 1.4826  # 1 / the upper quartile of the standard normal distribution


class History:
    """The latest values, in the order in which they came and in the order of their size.

    They are on the host, where the step's one read has brought them: nothing here waits for a device.

    Parameters
    ----------
    size : int
        How many are kept.
    logarithmic : bool
        They are judged by their logarithms, so all of them are above 0.

    Examples
    --------
    >>> history = History(5, logarithmic=False)
    >>> for value in (9.0, 1.0, 2.0, 4.0, 3.0, 5.0):
    ...     history.append(value)
    >>> history.values, history.median
    ([1.0, 2.0, 4.0, 3.0, 5.0], 3.0)
    >>> round(history.limit(threshold=2.0, min_ratio=1.1), 4)
    5.9652
    """

    def __init__(self, size: int, *, logarithmic: bool) -> None:
        self.size, self.logarithmic = size, logarithmic
        self._arrived: deque[float] = deque()
        self._ordered: list[float] = []

    def __len__(self) -> int:
        return len(self._arrived)

    @property
    def values(self) -> list[float]:
        """The values, the latest last."""
        return list(self._arrived)

    @property
    def median(self) -> float:
        """Their median; of logarithms the value that belongs to it. nan where there is none."""
        if not self._ordered:
            return math.nan
        median = _middle(self._ordered)
        return _exp(median) if self.logarithmic else median

    def append(self, value: float) -> None:
        """Add a finite value, and forget the first to come if there are too many."""
        if len(self._arrived) == self.size:
            del self._ordered[bisect_left(self._ordered, self._judged(self._arrived.popleft()))]
        self._arrived.append(value)
        insort(self._ordered, self._judged(value))

    def replace(self, values: Iterable[float]) -> None:
        """Have the latest of other values instead."""
        self._arrived = deque(values, maxlen=self.size)
        self._arrived = deque(self._arrived)
        self._ordered = sorted(map(self._judged, self._arrived))

    def limit(self, threshold: float, min_ratio: float) -> float:
        """Return the largest value that does not stand out; see `nvalchemi_hooks_spike_skip.kernels.reference`.

        Parameters
        ----------
        threshold : float
            How many standard deviations above the median, as far as the median absolute deviation tells them.
        min_ratio : float
            At least 1: no value stands out that is less than so many times the median.

        Raises
        ------
        IndexError
            There is no value yet.
        """
        median = _middle(self._ordered)
        spread = _TO_SIGMA * _middle_distance(self._ordered, median)
        if self.logarithmic:
            above = max(threshold * spread, math.log(min_ratio))
            return _exp(median + above) if above else math.inf
        above = max(threshold * spread, (min_ratio - 1.0) * abs(median))
        return median + above if above else math.inf

    def _judged(self, value: float) -> float:
        return math.log(value) if self.logarithmic else value


def _middle(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _middle_distance(ordered: Sequence[float], median: float) -> float:
    """Return the median distance from `median`: it bounds the half of the values that is next to it, a run of them."""
    half = len(ordered) // 2
    if len(ordered) % 2:
        return _distance(ordered, median, half + 1)
    return (_distance(ordered, median, half) + _distance(ordered, median, half + 1)) / 2


def _distance(ordered: Sequence[float], median: float, count: int) -> float:
    """Return how far the `count`-th nearest value is."""
    low, high = 0, len(ordered) - count
    while low < high:  # the run begins at the first value that is no farther than the one behind its end
        middle = (low + high) // 2
        if median - ordered[middle] > ordered[middle + count] - median:
            low = middle + 1
        else:
            high = middle
    return max(median - ordered[low], ordered[low + count - 1] - median)


def _exp(number: float) -> float:
    try:
        return math.exp(number)
    except OverflowError:
        return math.inf
