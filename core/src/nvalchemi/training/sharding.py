"""Tensors that are spread over ranks: telling them from others, and getting at the part that this rank holds.

A ``DTensor``, which FSDP2 makes of every parameter, is such a tensor. Nothing here communicates. Nothing here imports
``torch.distributed.tensor`` either: where nobody has, there is none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["any_sharded", "is_sharded", "like_sharded", "local_part", "local_parts", "placed_alike"]


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a tensor that is spread over ranks, or replicated on them by ``DTensor``.

    Examples
    --------
    >>> is_sharded(torch.zeros(2))
    False
    """
    known: Any = sys.modules.get("torch.distributed.tensor")
    return known is not None and isinstance(value, known.DTensor)


def any_sharded(tensors: Iterable[object]) -> bool:
    """Return whether any of some values is spread over ranks."""
    return "torch.distributed.tensor" in sys.modules and any(map(is_sharded, tensors))


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, in the same memory; of a tensor that is not sharded the tensor itself.

    Examples
    --------
    >>> tensor = torch.zeros(2)
    >>> local_part(tensor) is tensor
    True
    """
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        local: Tensor = tensor.to_local()
        return local


def local_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return what this rank holds of each tensor."""
    return [local_part(tensor) for tensor in tensors]


def placed_alike(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether tensors are spread over the same ranks in the same way, pair by pair.

    Element by element arithmetic on the local parts of such pairs is arithmetic on the whole tensors.
    """
    return all(map(_layout_equals, tensors, others))


def like_sharded(whole: Tensor, like: Tensor) -> Tensor:
    """Return a tensor that every rank holds whole in the layout of another, each rank keeping its own part.

    Parameters
    ----------
    whole : torch.Tensor
        Equal on all ranks.
    like : torch.Tensor
        Of the same shape; where it is not sharded, `whole` comes back as it is.
    """
    if not is_sharded(like) or is_sharded(whole):
        return whole
    from torch.distributed.tensor import distribute_tensor

    local = whole.to(like.to_local().device)
    return distribute_tensor(local, like.device_mesh, like.placements, src_data_rank=None)  # each rank cuts its own


def _layout_equals(tensor: Tensor, other: Tensor) -> bool:
    if is_sharded(tensor) and is_sharded(other):
        return tensor.placements == other.placements and tensor.device_mesh == other.device_mesh
    return not is_sharded(tensor) and not is_sharded(other)
