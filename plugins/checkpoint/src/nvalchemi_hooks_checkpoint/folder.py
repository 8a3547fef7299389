"""One folder of checkpoints and who saves there: a save at a time, the earlier ones kept until it is complete."""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

from nvalchemi.errors import CheckpointWriteError
from nvalchemi.training import take_snapshot
from nvalchemi_hooks_checkpoint.retention import (
    complete_checkpoints,
    latest_checkpoint,
    remove_checkpoint,
    remove_incomplete,
    write_index,
)
from nvalchemi_hooks_checkpoint.writer import Save

if TYPE_CHECKING:
    from nvalchemi_hooks_checkpoint.retention import Retention
    from nvalchemi_hooks_checkpoint.writer import Writer

__all__ = ["CheckpointFolder"]


class CheckpointFolder:
    """Saves runs into one folder.

    Parameters
    ----------
    root : Path
        The folder, absolute; it is made when it is claimed.
    kept : Retention
        Which of its checkpoints are kept.
    writer : Writer
        Who writes.
    on_error : {"raise", "warn"}
        What becomes of a write that failed.

    """

    _in_use: ClassVar[WeakValueDictionary[Path, CheckpointFolder]] = WeakValueDictionary()

    def __init__(self, root: Path, kept: Retention, writer: Writer, *, on_error: str) -> None:
        self.root, self.kept, self.writer, self.on_error = root, kept, writer, on_error
        self._save: Save | None = None  # the one that the writer has, or had
        self._is_claimed = False

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
        self.root.mkdir(parents=True, exist_ok=True)
        if self.kept.claimed:
            remove_incomplete(self.root)  # what a killed run left half written, or half removed
        elif found := complete_checkpoints(self.root):
            raise FileExistsError(
                f"CheckpointHook: root {self.root} holds checkpoints of another run, {found[-1]} for example, which "
                "this run would overwrite. To go on with that one, load it before training: "
                "load_training(latest_checkpoint(root), strategy). Else give another root, or remove this one."
            )
        self.kept.claimed = self._is_claimed = True

    def save(self, run: Any, step: int, *, best_value: float | None = None) -> None:
        """Save a run as it is now, unless its step is saved already; return when it is copied.

        Parameters
        ----------
        run : object
            With ``state_dict()``: a strategy.
        step : int
            Its executed steps.
        best_value : float, optional
            If it is the best so far: its value.
        """
        if self.kept.holds(step):
            return
        self.claim()
        self.flush()
        name = self.kept.add(step, best_value=best_value)
        try:
            snapshot = take_snapshot(run)
        except BaseException:  # raised again: nothing was saved, so nothing is recorded
            self.kept.withdraw(name)
            raise
        surplus = [self.root / one for one in self.kept.surplus()]
        self._save = Save(snapshot, self.root / name, surplus, self.kept.state())
        self.writer.submit(self._save)

    def is_better(self, value: float) -> bool:
        """Return whether a value is better than that of every checkpoint; wait for one of which that is not sure."""
        if self._save is not None and self.kept.best == self._save.folder.name:
            self.flush()  # it may have failed, and then the value before counts
        return self.kept.improves(value)

    def mark_best(self, value: float) -> None:
        """Put the last one down as the best."""
        self.kept.mark(value)
        self.writer.submit(partial(write_index, self.root, self.kept.state()))

    def flush(self) -> None:
        """Wait for the write that is under way; complain if it failed."""
        failure = self.writer.wait()
        save, self._save = self._save, None
        if save is not None:
            for folder in save.removed:
                self.kept.forget(folder.name)
            if not save.written:
                self.kept.withdraw(save.folder.name)
                with suppress(OSError):  # the next save writes it again, and until then it names one that is not there
                    write_index(self.root, self.kept.state())
        if failure is not None:
            self._complain(failure, save.folder if save is not None and not save.written else self.root)

    def close(self) -> None:
        """Finish what is to be written and removed, and let others have the folder."""
        try:
            self.flush()
            self._tidy()
        finally:
            self.writer.close()
            self._is_claimed = False
            if self._in_use.get(self.root) is self:
                del self._in_use[self.root]

    def _tidy(self) -> None:
        """Remove what the last write did not: one that was the best and is not any more."""
        surplus = self.kept.surplus()
        try:
            for name in surplus:
                remove_checkpoint(self.root / name)
                self.kept.forget(name)
            if surplus:
                write_index(self.root, self.kept.state())
        except OSError as failure:
            self._complain(failure, self.root)

    def _complain(self, failure: BaseException, where: Path) -> None:
        latest = latest_checkpoint(self.root)
        rest = f"the latest checkpoint is {latest}" if latest else "there is no earlier checkpoint"
        reason = failure.strerror if isinstance(failure, OSError) and failure.strerror else repr(failure)
        message = f"CheckpointHook failed to write {where}. {reason}. Training can go on; {rest}."
        if self.on_error == "raise":
            error = CheckpointWriteError(message)
            error.errno = failure.errno if isinstance(failure, OSError) else None
            raise error from failure
        warnings.warn(message, RuntimeWarning, stacklevel=2)
