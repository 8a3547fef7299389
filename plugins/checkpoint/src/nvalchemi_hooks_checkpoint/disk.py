"""What is in a folder of checkpoints: which are complete, the index beside them, and how both survive a power cut."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvalchemi_hooks_checkpoint.retention import best_of, checked_state, step_of

__all__ = [
    "best_checkpoint",
    "complete_checkpoints",
    "is_complete",
    "latest_checkpoint",
    "make_folder",
    "read_index",
    "remove_checkpoint",
    "remove_incomplete",
    "sync_folder",
    "write_index",
]

INDEX = "index.json"
_MANIFEST = "manifest.json"  # a checkpoint is complete when this is there: it is the last to be written


def is_complete(folder: Path) -> bool:
    """Return whether a folder holds a checkpoint that was written to its end."""
    return (folder / _MANIFEST).is_file()


def complete_checkpoints(root: Path) -> list[str]:
    """Return the names of the complete checkpoints in `root`, by their steps."""
    steps = ((step_of(path.name), path.name) for path in root.glob("step-*") if is_complete(path))
    return [name for step, name in sorted((step, name) for step, name in steps if step is not None)]


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint; its manifest first, so that half of it is never taken for one.

    Of a link only the link is removed: what it leads to was put there by somebody else.
    """
    if folder.is_symlink():
        folder.unlink()
    elif folder.is_dir():
        (folder / _MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)


def remove_incomplete(root: Path) -> None:
    """Remove folders of checkpoints that were not written, or not removed, to the end; no file and no link is one."""
    for path in root.glob("step-*"):
        if step_of(path.name) is not None and not path.is_symlink() and not is_complete(path):
            remove_checkpoint(path)
    for path in root.glob(f".{INDEX}.*"):
        path.unlink(missing_ok=True)


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
    written = [name for name in read_index(folder).get("kept", ()) if name in complete]
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
    folder = Path(root)
    index = read_index(folder)
    complete = [name for name in index.get("kept", ()) if is_complete(folder / name)]
    best = best_of(complete, index.get("values", {}))
    return folder / best if best is not None else None


def read_index(root: Path) -> Mapping[str, Any]:
    """Return the record that the index in `root` holds, or nothing if there is none that can be read."""
    try:
        index = json.loads((root / INDEX).read_text(encoding="utf-8"))
        checked_state(index)
    except (OSError, ValueError, RecursionError):  # checkpoints are found and loaded without it
        return {}
    return dict(index)


def write_index(root: Path, state: Mapping[str, Any]) -> None:
    """Write which checkpoints are kept, in the order of writing, and how good they are; aside, then in its place."""
    aside = root / f".{INDEX}.{os.getpid()}"
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(json.dumps(dict(state), indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        aside.replace(root / INDEX)
    finally:
        aside.unlink(missing_ok=True)  # there is one only if this failed
    sync_folder(root)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, so that they survive a power cut."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut, where the system has such a thing."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
