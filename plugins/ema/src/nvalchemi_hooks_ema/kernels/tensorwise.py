"""One tensor at a time, in place: for subclasses, sharded tensors say, that know few multi-tensor operations."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["blend_", "blend_rounded_", "copy_"]


def blend_(averages: list[Tensor], values: list[Tensor], weight: float, veto: Tensor | None = None) -> None:
    """Move every average towards its value, in place: ``average += weight * (value - average)``.

    Parameters
    ----------
    averages, values : lists of torch.Tensor
        Equally long, pairwise of one shape, device and dtype.
    weight : float
        1 - decay.
    veto : torch.Tensor, optional
        0-dim, exactly 0 or 1. With 1 no bit of an average changes.

    Examples
    --------
    >>> average = torch.tensor([1.0])
    >>> blend_([average], [torch.tensor([3.0])], 0.5)
    >>> blend_([average], [torch.tensor([torch.nan])], 0.5, veto=torch.tensor(1.0))
    >>> average
    tensor([2.])
    """
    for average, value in zip(averages, values, strict=True):
        if veto is None:
            average.lerp_(value, weight)
        else:
            average.copy_(torch.where(veto.ne(0), average, average.lerp(value, weight)))


def blend_rounded_(
    accumulators: list[Tensor], averages: list[Tensor], values: list[Tensor], weight: float, veto: Tensor | None = None
) -> None:
    """Average low-precision values in float32 accumulators; the averages become the rounded accumulators.

    Examples
    --------
    >>> accumulator, average = torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float16)
    >>> blend_rounded_([accumulator], [average], [torch.tensor([3.0], dtype=torch.float16)], 0.5)
    >>> accumulator, average
    (tensor([2.]), tensor([2.], dtype=torch.float16))
    """
    for accumulator, average, value in zip(accumulators, averages, values, strict=True):
        blend_([accumulator], [value.to(accumulator.dtype)], weight, veto)
        average.copy_(accumulator)


def copy_(averages: list[Tensor], values: list[Tensor], veto: Tensor | None = None) -> None:
    """Copy every value into its average; with a veto of 1 no bit changes.

    Examples
    --------
    >>> average = torch.tensor([1.0])
    >>> copy_([average], [torch.tensor([3.0])])
    >>> average
    tensor([3.])
    """
    for average, value in zip(averages, values, strict=True):
        average.copy_(value if veto is None else torch.where(veto.ne(0), average, value))
