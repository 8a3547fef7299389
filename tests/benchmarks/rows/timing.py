"""Ratios within one run: two loops by turns, many times, and the median of what came out.

The clock counts the processor's time of this process, so that whoever else uses the machine counts less; torch runs on
one thread, so that nothing is counted twice.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import process_time

__all__ = ["Contestant", "Effort", "Ratio", "calls", "compare", "seconds_each"]

Contestant = Callable[[int], float]  # does its work so many times, and returns the seconds that it took


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Parameters
    ----------
    rounds : int
        How many pairs a ratio is the median of.
    slice : float
        About how many seconds of the base a round takes.
    warm_up : int
        Steps before anything is measured.
    """

    rounds: int = 25
    slice: float = 0.02
    warm_up: int = 10


@dataclass(frozen=True)
class Ratio:
    """A median and its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Ratio:
        """Return median and quartiles of at least two values."""
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


def calls(step: Callable[[], object]) -> Contestant:
    """Return a contestant that calls `step`."""

    def run(times: int) -> float:
        begin = process_time()
        for _ in range(times):
            step()
        return process_time() - begin

    return run


def compare(base: Contestant, contestants: Mapping[str, Contestant], effort: Effort) -> dict[str, Ratio]:
    """Return the time of each contestant as a ratio to `base`, each measured right beside it."""
    times = _calibrated(base, effort)
    for contestant in contestants.values():
        contestant(effort.warm_up)
    ratios: dict[str, list[float]] = {name: [] for name in contestants}
    gc.collect()
    gc.disable()
    try:
        for number in range(effort.rounds):
            for name, contestant in contestants.items():
                pair = (base, contestant) if number % 2 else (contestant, base)
                first, second = (one(times) for one in pair)
                ratios[name].append(second / first if number % 2 else first / second)
            gc.collect()
    finally:
        gc.enable()
    return {name: Ratio.of(values) for name, values in ratios.items()}


def seconds_each(contestant: Contestant, effort: Effort) -> Ratio:
    """Return the seconds of one of its calls."""
    times = _calibrated(contestant, effort)
    return Ratio.of([contestant(times) / times for _ in range(effort.rounds)])


def _calibrated(contestant: Contestant, effort: Effort) -> int:
    contestant(effort.warm_up)
    few = max(1, effort.warm_up)
    return max(1, round(effort.slice * few / max(contestant(few), 1e-9)))
