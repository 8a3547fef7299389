"""Lists of tensors at once, with torch's own multi-tensor operations.

Each list holds tensors of one device and one dtype. The weight is a Python float: as a 0-dim tensor it would be read by
the host, which waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["blend_", "blend_rounded_", "copy_"]


def blend_(averages: list[Tensor], values: list[Tensor], weight: float) -> None:
    """Move every average towards its value, in place: ``average += weight * (value - average)``.

    Parameters
    ----------
    averages, values : lists of torch.Tensor
        Equally long, pairwise of one shape; floating or complex, all of one dtype.
    weight : float
        1 - decay. The numbers are those of `torch.optim.swa_utils.get_ema_multi_avg_fn`, bit for bit.

    Examples
    --------
    >>> average = torch.tensor([1.0])
    >>> blend_([average], [torch.tensor([3.0])], 0.5)
    >>> average
    tensor([2.])
    """
    torch._foreach_lerp_(averages, values, weight)


def blend_rounded_(accumulators: list[Tensor], averages: list[Tensor], values: list[Tensor], weight: float) -> None:
    """Average low-precision values in wider accumulators; the averages become the rounded accumulators.

    An average in bfloat16 or float16 would never move: its change in one step is below half a unit in the last place.

    Parameters
    ----------
    accumulators : list of torch.Tensor
        float32; they hold the average and are changed in place.
    averages, values : lists of torch.Tensor
        In low precision. The values are widened first: one float32 copy of this list for the time of the call.
    weight : float
        1 - decay.

    Examples
    --------
    >>> accumulator, average = torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.bfloat16)
    >>> blend_rounded_([accumulator], [average], [torch.tensor([2.0], dtype=torch.bfloat16)], 0.001)
    >>> round(accumulator.item(), 6), average.item()
    (1.001, 1.0)
    """
    widened = [value.to(accumulator.dtype) for value, accumulator in zip(values, accumulators, strict=True)]
    torch._foreach_lerp_(accumulators, widened, weight)
    torch._foreach_copy_(averages, accumulators)


def copy_(averages: list[Tensor], values: list[Tensor]) -> None:
    """Copy every value into its average.

    Parameters
    ----------
    averages, values : lists of torch.Tensor
        Equally long, pairwise of one shape; any dtype.

    Examples
    --------
    >>> average = torch.tensor([1])
    >>> copy_([average], [torch.tensor([3])])
    >>> average
    tensor([3])
    """
    torch._foreach_copy_(averages, values)
