"""Progress of a run, where a person looks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress
    from torch import Tensor

    from nvalchemi.hooks.context import TrainContext

__all__ = ["RunProgress"]

_SECONDS_BETWEEN_LOOKS = 0.5  # showing the loss reads it from the device, so it is not looked at every step


class RunProgress:
    """A progress bar on a terminal; nothing anywhere else.

    Parameters
    ----------
    total : int or None
        Steps or batches until the end; None if unknown.
    done : int
        How many of them are behind.
    shown : bool or None
        None shows it when standard error is a terminal.
    """

    def __init__(self, total: int | None, done: int, shown: bool | None) -> None:
        self._bar: Progress | None = None
        self._latest: tuple[int, Tensor | None, Callable[[], int]] = (0, None, lambda: done)
        self._next_look = 0.0
        if sys.stderr.isatty() if shown is None else shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[loss]}"))
            self._bar = Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True))
            self._task = self._bar.add_task("training", total=total, completed=done, loss="")

    def advance(self, ctx: TrainContext, done: Callable[[], int]) -> None:
        """Show how far the run has come, every now and then; `done` is asked only then."""
        self._latest = (ctx.epoch, ctx.loss, done)
        if self._bar is not None and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _SECONDS_BETWEEN_LOOKS
            self._show(self._bar)

    def _show(self, bar: Progress) -> None:
        epoch, loss, done = self._latest
        text = "" if loss is None else f"loss {float(loss):.4g}"
        bar.update(self._task, completed=done(), description=f"epoch {epoch + 1}", loss=text)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            if error is None:
                self._show(self._bar)
            self._bar.stop()
