"""One tensor at a time, in place: for subclasses, sharded tensors say, that know few multi-tensor operations."""

from __future__ import annotations

from torch import Tensor

__all__ = ["blend_", "blend_rounded_", "copy_"]


def blend_(averages: list[Tensor], values: list[Tensor], weight: float) -> None:
    """Move every average towards its value, in place: ``average += weight * (value - average)``.

    Examples
    --------
    >>> import torch
    >>> average = torch.tensor([1.0])
    >>> blend_([average], [torch.tensor([3.0])], 0.5)
    >>> average
    tensor([2.])
    """
    for average, value in zip(averages, values, strict=True):
        average.lerp_(value, weight)


def blend_rounded_(accumulators: list[Tensor], averages: list[Tensor], values: list[Tensor], weight: float) -> None:
    """Average low-precision values in wider accumulators; the averages become the rounded accumulators.

    Examples
    --------
    >>> import torch
    >>> accumulator, average = torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float16)
    >>> blend_rounded_([accumulator], [average], [torch.tensor([3.0], dtype=torch.float16)], 0.5)
    >>> accumulator, average
    (tensor([2.]), tensor([2.], dtype=torch.float16))
    """
    for accumulator, average, value in zip(accumulators, averages, values, strict=True):
        average.copy_(accumulator.lerp_(value.to(accumulator.dtype), weight))


def copy_(averages: list[Tensor], values: list[Tensor]) -> None:
    """Copy every value into its average.

    Examples
    --------
    >>> import torch
    >>> average = torch.tensor([1.0])
    >>> copy_([average], [torch.tensor([3.0])])
    >>> average
    tensor([3.])
    """
    for average, value in zip(averages, values, strict=True):
        average.copy_(value)
