"""Low precision: bfloat16 and float16 are averaged in float32 accumulators, and the averages are these, rounded.

An average in low precision would never move: its change in one step is below half a unit in the last place. Values are
widened into a room that is kept from step to step, so that an update allocates nothing and is a few launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["blend_", "in_chunks", "room_for"]

_CHUNK = 2**22  # elements that are widened at a time: 16 MiB

Row = tuple[Tensor, Tensor, Tensor]  # accumulator, average, value


def blend_(
    blend_wide_: Callable[..., None],
    accumulators: list[Tensor],
    averages: list[Tensor],
    values: list[Tensor],
    widened: list[Tensor],
    weight: float,
    veto: Tensor | None = None,
) -> None:
    """Average low-precision values in accumulators; the averages become the rounded accumulators.

    Parameters
    ----------
    blend_wide_ : callable
        The ``blend_`` of another kernel, for float32.
    accumulators : list of torch.Tensor
        float32; they hold the average and are changed in place.
    averages, values : lists of torch.Tensor
        In low precision.
    widened : list of torch.Tensor
        float32, room for the values; see `room_for`.
    weight : float
        1 - decay.
    veto : torch.Tensor, optional
        0-dim on the device of the lists, exactly 0 or 1. With 1 no accumulator changes, and so no average does.

    Examples
    --------
    >>> from nvalchemi_hooks_ema.kernels import foreach
    >>> accumulator, average = torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.bfloat16)
    >>> value = torch.tensor([2.0], dtype=torch.bfloat16)
    >>> blend_(foreach.blend_, [accumulator], [average], [value], room_for([[accumulator]])[0], 0.001)
    >>> round(accumulator.item(), 6), average.item()
    (1.001, 1.0)
    """
    torch._foreach_copy_(widened, values)
    blend_wide_(accumulators, widened, weight, veto)
    torch._foreach_copy_(averages, accumulators)


def room_for(chunks: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Return tensors shaped like those of each chunk; all chunks share one piece of memory.

    Parameters
    ----------
    chunks : sequence of sequences of torch.Tensor
        float32, on one device, without overlap in themselves.

    Examples
    --------
    >>> one, other = room_for([[torch.zeros(2, 3)], [torch.zeros(4), torch.zeros(())]])
    >>> [tensor.shape for tensor in other], one[0].data_ptr() == other[0].data_ptr()
    ([torch.Size([4]), torch.Size([])], True)
    """
    sizes = [[_aligned(like.numel()) for like in chunk] for chunk in chunks]
    flat = torch.empty(max(map(sum, sizes)), dtype=torch.float32, device=chunks[0][0].device)
    return [
        [_shaped(piece, like) for piece, like in zip(torch.split(flat[: sum(size)], size), chunk, strict=True)]
        for chunk, size in zip(chunks, sizes, strict=True)
    ]


def in_chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Cut rows so that few elements are widened at a time: large contiguous tensors are cut themselves."""
    chunk: list[Row] = []
    elements = 0
    for row in (part for whole in rows for part in _parts(whole)):
        elements += row[0].numel()
        if chunk and elements > _CHUNK:
            yield chunk
            chunk, elements = [], row[0].numel()
        chunk.append(row)
    if chunk:
        yield chunk


def _parts(row: Row) -> Iterable[Row]:
    if row[0].numel() <= _CHUNK or not all(map(Tensor.is_contiguous, row)):
        return [row]
    accumulators, averages, values = (torch.split(tensor.detach().view(-1), _CHUNK) for tensor in row)
    return zip(accumulators, averages, values, strict=True)


def _shaped(piece: Tensor, like: Tensor) -> Tensor:
    extent = 1 + sum((size - 1) * step for size, step in zip(like.shape, like.stride(), strict=True))
    if like.numel() and extent == like.numel():  # without gaps, in whatever order of dimensions
        return piece.as_strided(like.shape, like.stride())
    return torch.empty_like(like)


def _aligned(elements: int) -> int:
    return -(-elements // 16) * 16  # whole lines of cache
