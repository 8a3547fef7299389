"""``{section: plain data}`` to disk: written aside, and completed by one rename."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from nvalchemi.errors import CheckpointWriteError
from nvalchemi.training.checkpoint.manifest import DATA_FOLDER, MANIFEST, Manifest, SectionFile

__all__ = ["Attempt", "attempt", "not_written", "write_file", "write_sections"]


def write_sections(
    root: str | Path, sections: Mapping[str, Any], *, kind: str, metadata: Mapping[str, Any] | None = None
) -> Manifest:
    """Write a checkpoint; an earlier one in the same place stays whole until this one is complete.

    The files are written into a new folder and flushed to the disk; then the manifest takes the place of the old one by
    a rename, which happens or does not; then what the new manifest does not name is removed.

    Parameters
    ----------
    root : path
        Where; the folder is made.
    sections : mapping of str to plain data
        One file each; checked by `nvalchemi.training.plain.check_plain` before.
    kind : str
        What it is a checkpoint of.
    metadata : mapping, optional
        JSON data for the manifest.

    Raises
    ------
    CheckpointWriteError
        An ``OSError`` with the cause: what was written is removed, and the earlier checkpoint is as it was.
    """
    root = Path(root)
    try:
        with attempt(root) as new:
            manifest = new.complete(kind, new.write(sections), metadata or {})
    except OSError as error:
        raise CheckpointWriteError(error.errno, not_written(error), str(root)) from error
    new.remove_others()
    return manifest


class Attempt:
    """A checkpoint that is being written into a folder of its own, beside the one that is there.

    Parameters
    ----------
    root : Path
        Where the checkpoint is to be.
    folder : Path
        The folder of its files, in `root`.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        self.is_complete = False

    def write(self, sections: Mapping[str, Any]) -> dict[str, SectionFile]:
        """Write one file for each section, and return what the manifest says of them."""
        return {
            name: write_file(self.folder, f"{place}{_slug(name)}.pt", partial(torch.save, section))
            for place, (name, section) in enumerate(sections.items())
        }

    def complete(self, kind: str, files: Mapping[str, SectionFile], metadata: Mapping[str, Any]) -> Manifest:
        """Have a manifest take the place of the earlier one, by a rename; all files that it names are written."""
        manifest = Manifest(kind, self.folder.name, dict(files), dict(metadata))
        _write_text(self.folder / MANIFEST, manifest.to_json())
        _flush_folder(self.folder)
        (self.folder / MANIFEST).replace(self.root / MANIFEST)
        self.is_complete = True
        _flush_folder(self.root)
        return manifest

    def remove_others(self) -> None:
        """Remove the folders that no manifest names any more: of the earlier checkpoint, and of interrupted saves."""
        for path in self.root.iterdir():
            if DATA_FOLDER.fullmatch(path.name) and path.name != self.folder.name:
                shutil.rmtree(path, ignore_errors=True)  # the new checkpoint is complete; the next save tries again


@contextmanager
def attempt(root: Path) -> Iterator[Attempt]:
    """Make the folder of a new checkpoint; if it is not completed, it is removed."""
    folder = root / f"data-{secrets.token_hex(8)}"  # from the system's entropy: no generator of the run is drawn from
    new = Attempt(root, folder)
    try:
        folder.mkdir(parents=True)
        yield new
    finally:
        if not new.is_complete:
            shutil.rmtree(folder, ignore_errors=True)  # what cannot be removed now is removed by the next save


class _Summing:
    """A file that sums up what is written to it, and keeps the first error that torch may hide behind its own."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sum = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        if self.error is not None:  # torch goes on to write the end of its archive; the first error is the cause
            raise self.error
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.sum.update(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def write_file(folder: Path, file: str, write: Callable[[Any], object]) -> SectionFile:
    """Write a file, have it survive a power cut, and return its name, size and sum.

    Parameters
    ----------
    folder : Path
        Where.
    file : str
        Its name.
    write : callable
        Is given something with ``write`` and ``flush``.
    """
    with (folder / file).open("wb") as raw:
        summing = _Summing(raw)
        try:
            write(summing)
        except Exception:  # torch wraps what the file raised in errors of its own
            if summing.error is not None:
                raise summing.error from None
            raise
        raw.flush()
        os.fsync(raw.fileno())
    return SectionFile(file, summing.size, summing.sum.hexdigest())


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut, where the system has such a thing."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _slug(name: str) -> str:
    """Return a section's name as part of a file's name, for those who look into the folder."""
    return "." + (re.sub(r"[^A-Za-z0-9_-]+", "-", name)[:60] or "section")


def not_written(error: OSError) -> str:
    """Say why a checkpoint was not written, and what is left."""
    full = {
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EFBIG: "the file is too large",
    }
    why = full.get(error.errno or 0, error.strerror or str(error))
    return (
        f"The checkpoint was not written: {why}. An earlier checkpoint there is as it was, and the run can go on; make "
        "room, or save elsewhere"
    )
