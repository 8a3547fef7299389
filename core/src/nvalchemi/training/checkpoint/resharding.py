"""Sharded tensors from disk: each rank reads what it is going to hold, from whatever number of ranks saved it."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from functools import partial
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from nvalchemi.errors import CheckpointDamagedError
from nvalchemi.training.checkpoint.manifest import Manifest, compare_section
from nvalchemi.training.checkpoint.pieces import Piece, are_whole, read_pieces
from nvalchemi.training.saved_tensor import SavedTensor
from nvalchemi.training.sharding import is_sharded

__all__ = ["saved_tensors"]


def saved_tensors(root: str | Path, manifest: Manifest, files: Mapping[str, BufferedReader]) -> dict[str, SavedTensor]:
    """Return the tensors of which open files hold pieces, by name; their values are read when they are asked for.

    Parameters
    ----------
    root : path
        Where the checkpoint is.
    manifest : Manifest
        What it says of the files.
    files : mapping of str to file
        By section. A file is compared with its sum before the first value of it is read.

    Raises
    ------
    CheckpointDamagedError
        A file holds no pieces, or they are not the whole of their tensors.
    """
    pieces: dict[str, list[tuple[_File, Piece]]] = {}
    for section, opened in files.items():
        file = _File(manifest, section, opened)
        for piece in file.pieces():
            pieces.setdefault(piece.name, []).append((file, piece))
    for name, found in pieces.items():
        alike = len({(piece.shape, piece.dtype) for _, piece in found}) == 1
        if not alike or not are_whole(piece for _, piece in found):
            raise CheckpointDamagedError(
                f"The files of the ranks in {root} do not hold the whole of {name!r}, which no save leaves out; do not "
                "trust them."
            )
    return {
        name: SavedTensor(torch.Size(found[0][1].shape), found[0][1].dtype, partial(_read, name, found))
        for name, found in pieces.items()
    }


class _File:
    """The file of a rank, read no further than to its header until values are wanted."""

    def __init__(self, manifest: Manifest, section: str, file: BufferedReader) -> None:
        self._manifest, self._section, self._file = manifest, section, file
        self._content: mmap.mmap | None = None

    def pieces(self) -> list[Piece]:
        try:
            return read_pieces(self._file, self._manifest.sections[self._section].size)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointDamagedError(
                f"{self._file.name} (section {self._section!r}) is no file of sharded tensors: {error}; bring it back "
                "from a copy, or use an earlier checkpoint."
            ) from error

    @property
    def content(self) -> mmap.mmap:
        if self._content is None:
            compare_section(self._file, self._manifest, self._section)
            self._content = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._content


def _read(name: str, found: list[tuple[_File, Piece]], like: Tensor | None) -> Tensor:
    """Read a tensor whole, or what this rank holds of one that is spread over ranks like another."""
    first = found[0][1]
    target = torch.empty(first.shape, dtype=first.dtype)
    if like is not None and is_sharded(like):
        target = torch.empty_like(like, dtype=first.dtype, requires_grad=False)
    if not target.numel():
        return target
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({name: target}, _metadata(name, found), is_coordinator=True)
    by_place = {piece.offsets: (file, piece) for file, piece in found if 0 not in piece.sizes}
    with torch.no_grad():
        for item in planner.finish_plan(planner.create_local_plan()).items:
            file, piece = by_place[tuple(item.storage_index.offset or ())]
            values = piece.values(file.content)
            for dimension, (begin, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                values = values.narrow(dimension, begin, length)
            into = planner.resolve_tensor(item)
            into.copy_(values)
            planner.commit_tensor(item, into)
    return target


def _metadata(name: str, found: list[tuple[_File, Piece]]) -> Metadata:
    first = found[0][1]
    chunks = [
        ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
        for _, piece in found
        if 0 not in piece.sizes
    ]
    tensor = TensorStorageMetadata(TensorProperties(dtype=first.dtype), torch.Size(first.shape), chunks)
    return Metadata({name: tensor})
