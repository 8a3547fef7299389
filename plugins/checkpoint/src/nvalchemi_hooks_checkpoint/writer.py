"""Writing aside: one thing at a time in a thread of its own, and no failure lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from nvalchemi_hooks_checkpoint.retention import is_complete, remove_checkpoint, write_index

__all__ = ["Save", "Snapshot", "Writer"]


class Snapshot(Protocol):
    """A copy of the state of a run that can be written by another thread while the run goes on."""

    def write(self, root: Path) -> object:
        """Write it as a checkpoint into the folder `root`."""


class Save:
    """One checkpoint to write, and what it makes superfluous; called once, by whoever writes.

    Parameters
    ----------
    snapshot : Snapshot
        What is written; let go of as soon as it is.
    folder : Path
        Where to.
    surplus : list of Path
        Checkpoints to remove, once the new one is complete and not before.
    index : mapping
        What the index beside the checkpoints says from now on.

    Attributes
    ----------
    written : bool
        The checkpoint is complete.
    removed : list of Path
        What was removed so far.
    """

    def __init__(self, snapshot: Snapshot, folder: Path, surplus: list[Path], index: Mapping[str, Any]) -> None:
        self._snapshot: Snapshot | None = snapshot
        self._index = index
        self._surplus = surplus
        self.folder = folder
        self.written = False
        self.removed: list[Path] = []

    def __call__(self) -> None:
        """Write, let go, remove."""
        try:
            self._write()
        except BaseException:  # raised again, once the disk has back what is of no use
            if not is_complete(self.folder):
                shutil.rmtree(self.folder, ignore_errors=True)
            raise
        for folder in self._surplus:
            remove_checkpoint(folder)
            self.removed.append(folder)

    def _write(self) -> None:
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            write_index(self.folder.parent, self._index)  # before: an incomplete one is passed over by who reads it
            snapshot.write(self.folder)
        self.written = True


class Writer:
    """Runs work in the order in which it was given, in one thread that is there while it is needed.

    The interpreter does not exit before all work is done.

    Parameters
    ----------
    asynchronous : bool
        If False, work is done at once, by the caller; its failure is kept all the same.

    Examples
    --------
    >>> writer, written = Writer(), []
    >>> writer.submit(lambda: written.append("the first"))
    >>> writer.wait()
    >>> written
    ['the first']
    >>> writer.submit(lambda: 1 / 0)
    >>> writer.wait()
    ZeroDivisionError('division by zero')
    >>> writer.close()
    """

    def __init__(self, *, asynchronous: bool = True) -> None:
        self.asynchronous = asynchronous
        self._pending: list[Future[None]] = []
        self._thread: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[[], None]) -> None:
        """Have `work` done after what was given before, and return."""
        if self.asynchronous:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-writer")
            self._pending.append(self._thread.submit(work))
            return
        done: Future[None] = Future()
        try:
            work()
            done.set_result(None)
        except Exception as error:  # whatever it is, `wait` hands it out
            done.set_exception(error)
        self._pending.append(done)

    def wait(self) -> BaseException | None:
        """Wait until all work is done and return its first failure, once; later ones are notes on it."""
        pending, self._pending = self._pending, []
        failures = [error for work in pending if (error := work.exception()) is not None]
        for error in failures[1:]:
            failures[0].add_note(f"Later work failed as well: {error!r}")
        return failures[0] if failures else None

    def close(self) -> None:
        """Let the thread end when its work is done; more work starts another."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()

    def __reduce__(self) -> tuple[Callable[[bool], Writer], tuple[bool]]:
        return _writer, (self.asynchronous,)  # neither a thread nor its work can be copied


def _writer(asynchronous: bool) -> Writer:
    return Writer(asynchronous=asynchronous)
