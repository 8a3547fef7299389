"""One folder of checkpoints and who saves there: a save at a time, the earlier ones kept until it is complete."""

from __future__ import annotations

import secrets
import shutil
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from weakref import WeakValueDictionary

from torch import distributed

from nvalchemi.errors import CheckpointWriteError
from nvalchemi.training import take_snapshot
from nvalchemi_hooks_checkpoint.disk import (
    complete_checkpoints,
    is_complete,
    latest_checkpoint,
    make_folder,
    read_index,
    remove_checkpoint,
    remove_incomplete,
    sync_folder,
    write_index,
)

if TYPE_CHECKING:
    from nvalchemi_hooks_checkpoint.retention import Retention
    from nvalchemi_hooks_checkpoint.writer import Writer

__all__ = ["CheckpointFolder"]


class Snapshot(Protocol):
    """A copy of the state of a run that can be written by another thread while the run goes on."""

    def write(self, root: Path, *, prepare: Callable[[], object] | None = None) -> object:
        """Write it as a checkpoint into the folder `root`, after calling `prepare` where the first rank writes."""


class CheckpointFolder:
    """Saves runs into one folder.

    The record is changed by who trains, at a save, and by the writer, once it is clear what became of it.

    Parameters
    ----------
    root : Path
        The folder, absolute; it is made when it is claimed.
    kept : Retention
        Which of its checkpoints are kept.
    writer : Writer
        Who writes; by its lock the record is held.
    on_error : {"raise", "warn"}
        What becomes of a write that failed.

    Attributes
    ----------
    together : bool
        Several ranks write each checkpoint, every one its part. They keep the same record, and know the same when they
        save.
    leads : bool
        This rank sees to the folder: it alone writes the index and removes checkpoints.
    """

    _in_use: ClassVar[WeakValueDictionary[Path, CheckpointFolder]] = WeakValueDictionary()

    def __init__(self, root: Path, kept: Retention, writer: Writer, *, on_error: str) -> None:
        self.root, self._kept, self._writer, self._on_error = root, kept, writer, on_error
        self._is_claimed = False
        self.together, self.leads = False, True

    def claim(self) -> None:
        """Make the folder and see that nobody else saves there.

        Raises
        ------
        ValueError
            Another hook of this process does.
        FileExistsError
            It holds the checkpoints of another run.
        """
        if self._in_use.setdefault(self.root, self) is not self:
            raise ValueError(
                f"CheckpointHook: root {self.root} is in use by another CheckpointHook; give each a root of its "
                "own, or close the other first."
            )
        if self._is_claimed:
            return
        if self.together:
            self._claim_together()
        elif mark := self._look():
            self._kept.begin(mark)
        self._is_claimed = True

    def save(self, run: Any, step: int, *, best_value: float | None = None) -> None:
        """Save a run as it is now, unless its step is saved already; return when it is copied.

        There are never more than two copies: where one is being written and another waits for it, a third is taken
        when the first is written.

        Parameters
        ----------
        run : object
            With ``state_dict()``: a strategy.
        step : int
            Its executed steps.
        best_value : float, optional
            If it is the best so far: its value.
        """
        if self.holds(step):
            return
        self.claim()
        self._writer.wait(leave=0 if self.together else 1)
        self._report()
        with self._writer.lock:
            name = self._kept.add(step, best_value=best_value)
        try:
            copies: list[Snapshot] = [take_snapshot(run)]
        except BaseException:  # raised again: nothing was saved, so nothing is recorded
            with self._writer.lock:
                self._kept.forget(name)
            raise
        self._writer.submit(partial(self._write, name, copies), self.root / name)

    def holds(self, step: int) -> bool:
        """Return whether the last save was that of `step`."""
        with self._writer.lock:
            return self._kept.holds(step)

    def is_better(self, value: float) -> bool:
        """Return whether a value is better than that of every checkpoint; wait if that hangs on one not yet written."""
        with self._writer.lock:
            is_sure = self._kept.is_sure(value)
        if not is_sure:
            self.flush()
        with self._writer.lock:
            return self._kept.improves(value)

    def mark_best(self, step: int, value: float) -> None:
        """Put the last one, of `step`, down as the best, unless its write has just failed."""
        with self._writer.lock:
            if self._kept.holds(step):
                self._kept.mark(value)
            is_written = not self._kept.unwritten
        if is_written:  # else the index is written after it
            self._writer.submit(self._write_index, self.root)

    def state(self) -> dict[str, Any]:
        """Return which checkpoints there are, and how good they are."""
        with self._writer.lock:
            return self._kept.state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a record, as far as it is that of this folder; wait for what is to be written there first."""
        self._writer.wait()
        self._kept.load(state, index=read_index(self.root), complete=complete_checkpoints(self.root))
        self._is_claimed = False

    def flush(self) -> None:
        """Wait for what is to be written; complain if it failed."""
        self._writer.wait()
        self._report()

    def close(self) -> None:
        """Finish what is to be written and removed, and let others have the folder."""
        try:
            self.flush()
            if self._kept.surplus():  # one that was the best when the last was written, and is not any more
                self._writer.submit(self._tidy, self.root)
                self.flush()
        finally:
            self._writer.close()
            self._is_claimed = False
            if self._in_use.get(self.root) is self:
                del self._in_use[self.root]

    def _look(self) -> str | None:
        """Return the mark of a record to begin, or None if the folder is that of the record."""
        make_folder(self.root)
        index = read_index(self.root)
        if self._kept.folder is not None and self._kept.folder == index.get("folder"):
            remove_incomplete(self.root)  # what a killed run left half written, or half removed
            return None
        if found := complete_checkpoints(self.root):
            raise FileExistsError(_foreign(self.root, found[-1], has_index=bool(index)))
        return secrets.token_hex(8)  # from the system: no generator of the run is drawn from

    def _claim_together(self) -> None:
        """Let the first rank look, and the others know the mark, or what is wrong."""
        told: list[str | OSError | None] = [None]
        if self.leads:
            try:
                told = [self._look()]
            except OSError as error:  # raised again, once the others know
                told = [error]
        distributed.broadcast_object_list(told, src=0)
        if isinstance(told[0], OSError):
            raise told[0]
        if told[0] is not None:
            self._kept.begin(told[0])

    def _write(self, name: str, copies: list[Snapshot]) -> None:
        """Write a copy and remove what it makes superfluous; the writer does this."""
        folder = self.root / name
        try:
            # The index comes before: an incomplete one is passed over by who reads it. Where all ranks write, its
            # failure has to be that of all. Nobody else has the copy, so its memory is free once it is written.
            if self.together:
                copies.pop().write(folder, prepare=self._write_index)
            else:
                self._write_index()
                copies.pop().write(folder)
            if self.leads:
                sync_folder(self.root)
        except BaseException as error:  # raised again, once memory and disk have back what is of no use
            _let_go(error)
            with self._writer.lock:
                self._kept.forget(name)
            if self.leads and not is_complete(folder):
                shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # the next save writes it again, and until then it names one that is not there
                self._write_index()
            raise
        with self._writer.lock:
            self._kept.written(name)
        self._tidy()

    def _tidy(self) -> None:
        """Remove what is superfluous, and write down what is left."""
        with self._writer.lock:
            surplus = self._kept.surplus()
        for name in surplus:
            if self.leads:
                remove_checkpoint(self.root / name)
            with self._writer.lock:
                self._kept.forget(name)
        self._write_index()

    def _write_index(self) -> None:
        if self.leads:
            write_index(self.root, self.state())

    def _report(self) -> None:
        """Complain of what failed: of each by a warning, or of the first by an error with notes on the others."""
        failed = [(self._complaint(path, failure), failure) for path, failure in self._writer.failures()]
        if self._on_error == "warn":
            for complaint, _ in failed:
                warnings.warn(complaint, RuntimeWarning, stacklevel=2)
        elif failed:
            complaint, failure = failed[0]
            error = CheckpointWriteError(complaint)
            error.errno = failure.errno if isinstance(failure, OSError) else None
            for later, _ in failed[1:]:
                error.add_note(later)
            raise error from failure

    def _complaint(self, path: Path, failure: BaseException) -> str:
        where = self.root if is_complete(path) else path
        latest = latest_checkpoint(self.root)
        rest = f"the latest checkpoint is {latest}" if latest else "there is no earlier checkpoint"
        reason = failure.strerror if isinstance(failure, OSError) and failure.strerror else repr(failure)
        return f"CheckpointHook failed to write {where}. {reason}. Training can go on; {rest}."


def _let_go(error: BaseException | None) -> None:
    """Empty the frames that a failure holds, the copy of the state in them; where it was raised is still known."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _foreign(root: Path, found: str, *, has_index: bool) -> str:
    if not has_index:
        return (
            f"CheckpointHook: root {root} holds checkpoints, {found} for example, but no index.json that says of which "
            "run they are, and this run would overwrite them. Give another root, also to go on with that run: its "
            "checkpoints can be loaded. Or remove this one."
        )
    return (
        f"CheckpointHook: root {root} holds checkpoints of another run, {found} for example, which this run would "
        "overwrite. To go on with that one, load it before training: load_training(latest_checkpoint(root), strategy). "
        "Else give another root, or remove this one."
    )
