"""Writing aside: one thing at a time in a thread of its own, and no failure lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path

__all__ = ["Writer"]


class Writer:
    """Runs work in the order in which it was given, in one thread that is there while it is needed.

    The interpreter does not exit before all work is done.

    Parameters
    ----------
    asynchronous : bool
        If False, work is done at once, by the caller; its failure is kept all the same.

    Attributes
    ----------
    lock : threading.RLock
        For what work and those who give it both change.

    Examples
    --------
    >>> writer, written = Writer(), []
    >>> writer.submit(lambda: written.append("the first"), Path("a"))
    >>> writer.wait()
    >>> written, writer.failures()
    (['the first'], [])
    >>> writer.submit(lambda: 1 / 0, Path("b"))
    >>> writer.wait()
    >>> [(str(path), error) for path, error in writer.failures()]
    [('b', ZeroDivisionError('division by zero'))]
    >>> writer.close()
    """

    def __init__(self, *, asynchronous: bool = True) -> None:
        self.asynchronous = asynchronous
        self.lock = threading.RLock()
        self._pending: list[tuple[Path, Future[None]]] = []
        self._thread: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[[], None], path: Path) -> None:
        """Have `work`, on `path`, done after what was given before, and return."""
        if self.asynchronous:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-writer")
            self._pending.append((path, self._thread.submit(work)))
            return
        done: Future[None] = Future()
        try:
            work()
            done.set_result(None)
        except Exception as error:  # whatever it is, `failures` hands it out
            done.set_exception(error)
        self._pending.append((path, done))

    def wait(self, *, leave: int = 0) -> None:
        """Wait until no more than the last `leave` are not done; an interrupt ends the waiting, and not the work."""
        for _, work in self._pending[: len(self._pending) - leave]:
            work.exception()

    def failures(self) -> list[tuple[Path, BaseException]]:
        """Return what failed since this was last asked, and on which path."""
        done = list(takewhile(lambda pending: pending[1].done(), self._pending))
        del self._pending[: len(done)]
        return [(path, error) for path, work in done if (error := work.exception()) is not None]

    def close(self) -> None:
        """Let the thread end when its work is done; more work starts another."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()

    def __reduce__(self) -> tuple[Callable[[bool], Writer], tuple[bool]]:
        return _writer, (self.asynchronous,)  # neither a thread nor its work can be copied


def _writer(asynchronous: bool) -> Writer:
    return Writer(asynchronous=asynchronous)
