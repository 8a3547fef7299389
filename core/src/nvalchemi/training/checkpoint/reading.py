"""From disk to ``{section: plain data}``: all is checked first, then each section is read when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from nvalchemi.errors import CheckpointDamagedError, CheckpointError, CheckpointFormatError, CheckpointReadError
from nvalchemi.training.checkpoint.manifest import Manifest, is_piece, missing_sections, open_section, read_manifest
from nvalchemi.training.on_demand import OnDemand
from nvalchemi.training.saved_tensor import SavedTensor, put_in

__all__ = ["open_sections"]


@contextmanager
def open_sections(root: str | Path, *, kind: str) -> Iterator[tuple[OnDemand, Manifest]]:
    """Check every file of a checkpoint, and give its sections for as long as the context lasts; no code is run.

    The files stay open meanwhile: who removes or replaces the checkpoint does not disturb the reading. If it is
    replaced while they are being checked, the new one is taken. Files of sharded tensors are compared with their sums
    when something of them is read: a rank reads those that it needs.

    Parameters
    ----------
    root : path
        Where it is.
    kind : str
        What it has to be a checkpoint of.

    Yields
    ------
    (OnDemand, Manifest)
        Plain data by section, read anew whenever it is asked for, with a `SavedTensor` for each sharded one.

    Raises
    ------
    CheckpointMissingError, CheckpointReadError, CheckpointFormatError, CheckpointDamagedError
        See `read_manifest` and `open_section`; or it is a checkpoint of something else, or holds no plain data.
    """
    manifest = _manifest_of(root, kind)
    with ExitStack() as stack:
        while True:
            try:
                files = _open(root, manifest, stack)
                break
            except CheckpointError:
                replaced, manifest = manifest, _manifest_of(root, kind)
                if manifest.data == replaced.data:
                    raise
        tensors = _sharded_tensors(root, manifest, files)
        plain = {name: _Reader(file, tensors) for name, file in files.items() if not is_piece(name)}
        yield OnDemand(plain), manifest


def _manifest_of(root: str | Path, kind: str) -> Manifest:
    manifest = read_manifest(root)
    if manifest.kind != kind:
        read_with = {"models": "load_checkpoint", "training": "load_training"}.get(manifest.kind, "another function")
        raise CheckpointFormatError(
            f"{root} is a checkpoint of {manifest.kind!r}, not of {kind!r}; load it by {read_with}."
        )
    if missing := missing_sections(manifest):
        raise CheckpointDamagedError(
            f"The manifest in {root} names no file for {', '.join(map(repr, missing))}, which no save leaves out; do "
            "not trust it."
        )
    return manifest


def _open(root: str | Path, manifest: Manifest, stack: ExitStack) -> dict[str, BufferedReader]:
    files = {
        name: stack.enter_context(open_section(root, manifest, name, summed=not is_piece(name)))
        for name in manifest.sections
    }
    for name, file in files.items():
        if not is_piece(name):
            _refuse_code(file.name, name)
    return files


def _sharded_tensors(
    root: str | Path, manifest: Manifest, files: Mapping[str, BufferedReader]
) -> Mapping[str, SavedTensor]:
    """Return the sharded tensors by name; the module that knows of them is imported where there are any."""
    pieces = {name: file for name, file in files.items() if is_piece(name)}
    if not pieces:
        return {}
    from nvalchemi.training.checkpoint.resharding import saved_tensors

    return saved_tensors(root, manifest, pieces)


class _Reader:
    """Reads an open file anew at each call."""

    def __init__(self, file: BufferedReader, tensors: Mapping[str, SavedTensor]) -> None:
        self._file, self._tensors = file, tensors

    def __call__(self) -> Any:
        if self._file.closed:
            raise RuntimeError(
                f"{self._file.name} was asked for after its checkpoint was loaded; take what you need, or a "
                "copy of it, in load_state_dict."
            )
        self._file.seek(0)
        section = torch.load(self._file, map_location="cpu", weights_only=True)
        try:
            return put_in(section, self._tensors) if self._tensors else section
        except KeyError as error:
            raise CheckpointDamagedError(
                f"{self._file.name} belongs with a sharded tensor {error}, which no file of the checkpoint holds; no "
                "save of ours leaves it out: do not trust it."
            ) from error


def _refuse_code(path: str, name: str) -> None:
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # mapped: no tensor comes into memory
    except OSError as error:  # it was there a moment ago
        why = f"section {name!r} cannot be read any more: {error.strerror}; another process may be removing it"
        raise CheckpointReadError(error.errno, why, path) from error
    except Exception as error:  # a forged file can make the unpickler raise whatever it likes
        raise CheckpointDamagedError(
            f"{path} (section {name!r}) holds something that is no plain data, so it was not loaded; no save of ours "
            "writes such a file: do not trust it."
        ) from error
