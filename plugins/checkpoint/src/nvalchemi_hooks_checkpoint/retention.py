"""Which checkpoints are kept: the last k and the best, as names in one folder."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "Retention",
    "best_checkpoint",
    "checkpoint_name",
    "complete_checkpoints",
    "is_complete",
    "latest_checkpoint",
    "remove_checkpoint",
    "write_index",
]

INDEX = "index.json"
_MANIFEST = "manifest.json"  # a checkpoint is complete when this is there: it is the last to be written
_STATE = ("claimed", "kept", "best", "best_value", "metric", "mode")
_NAME = re.compile(r"step-(\d{8,})")


def checkpoint_name(step: int) -> str:
    """Return the name of the folder of a step.

    >>> checkpoint_name(30)
    'step-00000030'
    """
    return f"step-{step:08}"


def is_complete(folder: Path) -> bool:
    """Return whether a folder holds a checkpoint that was written to its end."""
    return (folder / _MANIFEST).is_file()


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint; its manifest first, so that half of it is never taken for one."""
    if folder.exists():
        (folder / _MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)


def remove_incomplete(root: Path) -> None:
    """Remove folders of checkpoints that were not written, or not removed, to the end."""
    for path in root.glob("step-*"):
        if _NAME.fullmatch(path.name) and not is_complete(path):
            remove_checkpoint(path)
    for path in root.glob(f".{INDEX}.*"):
        path.unlink(missing_ok=True)


def complete_checkpoints(root: Path) -> list[str]:
    """Return the names of the complete checkpoints in `root`, by their steps."""
    found = (path for path in root.glob("step-*") if _NAME.fullmatch(path.name) and is_complete(path))
    return [path.name for path in sorted(found, key=lambda path: _step(path.name))]


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """Return the checkpoint in `root` that was written last, or None if there is none that is complete.

    That is not the one of the highest step where a run was taken up again from an earlier one.

    Parameters
    ----------
    root : str or path
        The folder of a `CheckpointHook`; it need not exist.

    Examples
    --------
    >>> latest_checkpoint("no/such/folder") is None
    True
    """
    folder = Path(root)
    complete = complete_checkpoints(folder)
    written = [name for name in _read_index(folder).get("kept", ()) if name in complete]
    order = written or complete
    return folder / order[-1] if order else None


def best_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """Return the best checkpoint in `root`, or None if there is none.

    Parameters
    ----------
    root : str or path
        The folder of a `CheckpointHook` with `best`; it need not exist.

    Examples
    --------
    >>> best_checkpoint("no/such/folder") is None
    True
    """
    best = _read_index(Path(root)).get("best")
    return Path(root) / best if best is not None and is_complete(Path(root) / best) else None


def write_index(root: Path, state: Mapping[str, Any]) -> None:
    """Write which checkpoints are kept, in the order of writing, and which is the best; aside, then in its place."""
    aside = root / f".{INDEX}.{os.getpid()}"
    aside.write_text(json.dumps(dict(state), indent=1) + "\n", encoding="utf-8")
    aside.replace(root / INDEX)


class Retention:
    """The record of one folder of checkpoints. It touches no checkpoint; it says what is in use and what is not.

    Parameters
    ----------
    keep : int, optional
        How many of the last are kept; None for all.
    metric : str, optional
        By which the best is found.
    mode : {"min", "max"}
        Whether a low or a high value is good.

    Attributes
    ----------
    names : list of str
        The checkpoints in the order of writing.
    best : str, optional
        The best of them, of the value `best_value`.
    claimed : bool
        The folder belongs to this run.

    Examples
    --------
    >>> record = Retention(keep=1, metric="loss", mode="min")
    >>> record.add(10, best_value=0.5), record.add(20), record.add(30)
    ('step-00000010', 'step-00000020', 'step-00000030')
    >>> record.surplus(), record.best
    (['step-00000020'], 'step-00000010')
    """

    def __init__(self, *, keep: int | None, metric: str | None, mode: str) -> None:
        self._keep, self._metric, self._mode = keep, metric, mode
        self.claimed = False
        self.names: list[str] = []
        self.best: str | None = None
        self.best_value: float | None = None
        self._best_before: tuple[str | None, float | None] = (None, None)  # should the last one fail

    def holds(self, step: int) -> bool:
        """Return whether the last save was that of `step`."""
        return self.names[-1:] == [checkpoint_name(step)]

    def improves(self, value: float) -> bool:
        """Return whether a value of the metric is better than the best so far; nan never is."""
        if self.best_value is None:
            return not math.isnan(value)
        return value < self.best_value if self._mode == "min" else value > self.best_value

    def add(self, step: int, *, best_value: float | None = None) -> str:
        """Put a step down as the last one, with its value if it is the best, and return its name."""
        name = checkpoint_name(step)
        if name in self.names:  # of a run that was given up for this one
            self.names.remove(name)
            if self.best == name:
                self.best = self.best_value = None
        self.names.append(name)
        self._best_before = self.best, self.best_value
        if best_value is not None:
            self.mark(best_value)
        return name

    def mark(self, value: float) -> None:
        """Put the last one down as the best."""
        self.best, self.best_value = self.names[-1], value

    def withdraw(self, name: str) -> None:
        """Forget one that could not be written."""
        self.names.remove(name)
        if self.best == name:
            self.best, self.best_value = self._best_before

    def surplus(self) -> list[str]:
        """Return what is neither among the last nor the best."""
        recent = self.names if self._keep is None else self.names[-self._keep :]
        return [name for name in self.names if name not in recent and name != self.best]

    def forget(self, name: str) -> None:
        """Forget one that was removed."""
        self.names.remove(name)

    def state(self) -> dict[str, Any]:
        """Return the record as plain data."""
        best = {"best": self.best, "best_value": self.best_value, "metric": self._metric, "mode": self._mode}
        return {"claimed": self.claimed, "kept": list(self.names), **best}

    def load(self, state: Mapping[str, Any], root: Path) -> None:
        """Take over a record, as far as its checkpoints are in `root`.

        What was written there after it, by a run that was given up for this one, is taken over too, as the oldest. A
        best by another metric is no longer the best.

        Raises
        ------
        ValueError
            It is not what `state` returns; nothing is changed.
        """
        kept, complete = _checked(state), complete_checkpoints(root)
        abandoned = [name for name in complete if name not in kept] if state["claimed"] else []
        self.claimed = state["claimed"]
        self.names = abandoned + [name for name in kept if name in complete]
        self.best = self.best_value = None
        if (state["metric"], state["mode"]) == (self._metric, self._mode) and state["best"] in complete:
            self.best, self.best_value = state["best"], state["best_value"]
        self._best_before = self.best, self.best_value


def _step(name: str) -> int:
    return int(name.removeprefix("step-"))


def _read_index(root: Path) -> dict[str, Any]:
    try:
        index = json.loads((root / INDEX).read_text(encoding="utf-8"))
        _checked(index)
    except (OSError, ValueError):  # it helps to find checkpoints, they can do without
        return {}
    return dict(index)


def _checked(state: Any) -> list[str]:
    expected = f"give what CheckpointHook.state_dict() returned: {', '.join(_STATE)}"
    if not isinstance(state, Mapping) or set(state) != set(_STATE) or type(state["claimed"]) is not bool:
        raise ValueError(f"CheckpointHook: the state is {state!r}; {expected}.")
    kept, best, value = state["kept"], state["best"], state["best_value"]
    names = isinstance(kept, list) and all(isinstance(name, str) and _NAME.fullmatch(name) for name in kept)
    fits = best is None and value is None or best in kept and isinstance(value, float)
    if not names or not fits:
        raise ValueError(
            f"CheckpointHook: in the state kept is {kept!r}, best {best!r} and best_value {value!r}; {expected}."
        )
    return list(kept)
