"""What was measured of a hook's calls, and how it is shown."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Self

__all__ = ["Clock", "HookTiming", "table"]

_log = logging.getLogger("nvalchemi.hooks.trace")


@dataclass(slots=True)
class HookTiming:
    """The calls of one hook at one stage.

    Attributes
    ----------
    hook : str
        Its `state_key`, or its class's name.
    source : str
        The distribution and version it comes from.
    stage : str
        The stage, or ``"settled"``.
    calls : int
        How many there were.
    seconds, longest : float
        What they took on the host together, and the longest of them.
    """

    hook: str
    source: str
    stage: str
    calls: int = 0
    seconds: float = 0.0
    longest: float = 0.0

    def add(self, seconds: float, ctx: Any, answer: object) -> None:
        """Count a call, and log it."""
        self.calls += 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)
        if _log.isEnabledFor(logging.DEBUG) and getattr(ctx, "global_rank", 0) == 0:
            said = ", said no" if answer is False or (isinstance(answer, tuple) and answer[:1] == (False,)) else ""
            batch = getattr(ctx, "batch_count", "?")  # a step count might make the host wait for the device
            _log.debug(
                "batch %s, %s: %s (%s) took %.0f us%s", batch, self.stage, self.hook, self.source, 1e6 * seconds, said
            )


class Clock:
    """Time a block, also when it raises."""

    answer: Any = None

    def __init__(self, timing: HookTiming, ctx: Any) -> None:
        self._timing, self._ctx = timing, ctx

    def __enter__(self) -> Self:
        self._start = perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self._timing.add(perf_counter() - self._start, self._ctx, self.answer)


def table(timings: Sequence[HookTiming]) -> Iterator[str]:
    """Yield the lines of a table of timings."""
    yield "Time on the host in hooks; that of the orchestrator holds its hooks, backward and the optimizers' steps:"
    rows = [("HOOK", "FROM", "STAGE", "CALLS", "TOTAL MS", "MEAN US", "LONGEST US")]
    for one in timings:
        times = f"{1e3 * one.seconds:.2f}", f"{1e6 * one.seconds / one.calls:.0f}", f"{1e6 * one.longest:.0f}"
        rows.append((one.hook, one.source, one.stage, str(one.calls), *times))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        text = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
        numbers = [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
        yield "  ".join([*text, *numbers]).rstrip()
