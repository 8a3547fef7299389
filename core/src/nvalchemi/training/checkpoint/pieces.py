"""A file of pieces of tensors: what one rank held of each, and where that belongs in the whole.

The format is that of safetensors: the length of a header, the header in JSON, bytes. Where a piece lies in its tensor
is said where ``torch.distributed.checkpoint`` says it in such files, so that its reader of them reads these, too.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import torch
from torch import Tensor

from nvalchemi.errors import NotPlainDataError
from nvalchemi.training.shape import Each, misfit

__all__ = ["Piece", "read_pieces", "write_pieces"]

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_INFO = "__metadata__"
_WHERE = "DCP_SHARDING_INFO"
_ENTRY = {"dtype": str, "shape": [int], "data_offsets": [int]}
_PLACE = {"saved_offsets": [int], "global_shape": [int]}


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor.

    Attributes
    ----------
    name : str
        The tensor's.
    shape : tuple of int
        Of the whole tensor.
    offsets, sizes : tuple of int
        Where the box begins, and how far it goes, along each dimension.
    dtype : torch.dtype
        The tensor's.
    begin : int
        Where its bytes begin in the file; 0 before it is written.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    begin: int = 0

    def values(self, content: mmap.mmap) -> Tensor:
        """Return its values, which lie in the mapped file until they are touched."""
        count = prod(self.sizes)
        if not count:
            return torch.empty(self.sizes, dtype=self.dtype)
        return torch.frombuffer(content, dtype=self.dtype, count=count, offset=self.begin).view(self.sizes)


def write_pieces(file: BinaryIO, pieces: Sequence[tuple[Piece, Tensor]]) -> None:
    """Write pieces with their values, each tensor once.

    Raises
    ------
    NotPlainDataError
        A ``TypeError``: the dtype of a tensor has no name in this format.
    """
    ordered = sorted(pieces, key=lambda pair: -pair[0].dtype.itemsize)  # so that each begins at a multiple of its size
    header: dict[str, Any] = {_INFO: {"format": "pt", "DCP_VERSION": "1.0"}}
    places, end = {}, 0
    for piece, _ in ordered:
        if piece.dtype not in _NAMES:
            raise NotPlainDataError(
                f"{piece.name} is {piece.dtype}, which cannot be saved from several ranks; save it as a real tensor, "
                "by torch.view_as_real for example."
            )
        begin, end = end, end + prod(piece.sizes) * piece.dtype.itemsize
        places[piece.name] = {"saved_offsets": list(piece.offsets), "global_shape": list(piece.shape)}
        header[piece.name] = {
            "dtype": _NAMES[piece.dtype], "shape": list(piece.sizes), "data_offsets": [begin, end]
        }  # fmt: skip
    header[_INFO][_WHERE] = json.dumps(places)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for _, values in ordered:
        if values.numel():
            file.write(values.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def read_pieces(file: BinaryIO, size: int) -> list[Piece]:
    """Return what is in a file of so many bytes, its values apart.

    Raises
    ------
    ValueError
        It is no such file; its header does not fit its length, for example.
    """
    file.seek(0)
    (length,) = struct.unpack("<Q", file.read(8)) if size >= 8 else (size,)
    if 8 + length > size:
        raise ValueError(f"its header of {length} bytes does not fit into {size}")
    header = json.loads(file.read(length))
    places = json.loads(header[_INFO][_WHERE]) if isinstance(header, dict) and _INFO in header else None
    entries = {name: entry for name, entry in header.items() if name != _INFO} if places is not None else None
    if wrong := misfit(entries, Each(_ENTRY), "header") or misfit(places, Each(_PLACE), "header[places]"):
        raise ValueError(wrong)
    assert entries is not None
    assert places is not None
    return [_piece(name, entry, places[name], 8 + length, size) for name, entry in entries.items()]


def _piece(name: str, entry: dict[str, Any], place: dict[str, Any], base: int, size: int) -> Piece:
    dtype = _DTYPES[entry["dtype"]]
    sizes, offsets, shape = (tuple(one) for one in (entry["shape"], place["saved_offsets"], place["global_shape"]))
    begin, end = entry["data_offsets"]
    inside = len(sizes) == len(offsets) == len(shape) and all(
        offset >= 0 and extent >= 0 and offset + extent <= whole
        for offset, extent, whole in zip(offsets, sizes, shape, strict=True)
    )
    if not inside or end - begin != prod(sizes) * dtype.itemsize or begin < 0 or base + end > size:
        raise ValueError(f"the piece of {name!r} lies outside its tensor, or outside the file")
    return Piece(name, shape, offsets, sizes, dtype, base + begin)


def are_whole(pieces: Iterable[Piece]) -> bool:
    """Return whether pieces of one tensor are as much as the whole."""
    chosen = list(pieces)
    boxes = {(piece.offsets, piece.sizes) for piece in chosen if prod(piece.sizes)}
    return sum(prod(sizes) for _, sizes in boxes) == prod(chosen[0].shape)
