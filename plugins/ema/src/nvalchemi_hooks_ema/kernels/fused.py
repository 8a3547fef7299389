"""The same blend in one pass over all tensors, borrowed from torch's fused SGD.

SGD with the average as its parameter, the value as its gradient, a weight decay of -1 and a learning rate of -weight
computes ``average += weight * (value - average)``. On a CPU, where ``torch._foreach_lerp_`` is a loop, it has less
overhead a tensor.

The operation is private to torch, and for half precision on a CPU it is wrong in torch 2.13. So it is used for float32
and float64 on a CPU only, and only after `agrees` has seen the very bits of ``torch._foreach_lerp_``.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

__all__ = ["agrees", "blend_", "takes"]

_BRANCH_OF_LERP = 0.5  # from here on lerp computes value - (1 - weight) * (value - average), which rounds differently


def blend_(averages: list[Tensor], values: list[Tensor], weight: float) -> None:
    """Move every average towards its value, in place, as `foreach.blend_` does.

    Parameters
    ----------
    averages, values : lists of torch.Tensor
        float32 or float64, contiguous, all of one dtype, on a CPU. The values are not changed.
    weight : float
        1 - decay, below 0.5.

    Examples
    --------
    >>> average = torch.tensor([1.0])
    >>> blend_([average], [torch.tensor([3.0])], 0.25)
    >>> average
    tensor([1.5000])
    """
    torch._fused_sgd_(
        averages,
        values,
        [],
        weight_decay=-1.0,
        momentum=0.0,
        lr=-weight,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def takes(average: Tensor, value: Tensor, weight: float) -> bool:
    """Return whether `blend_` may be used for a pair of tensors.

    Examples
    --------
    >>> takes(torch.zeros(2), torch.ones(2), 0.9)
    False
    """
    return (
        weight < _BRANCH_OF_LERP
        and average.device.type == value.device.type == "cpu"
        and average.dtype == value.dtype
        and average.is_contiguous()
        and value.is_contiguous()
        and agrees(average.dtype)
    )


@cache
def agrees(dtype: torch.dtype) -> bool:
    """Return whether `blend_` has the bits of ``torch._foreach_lerp_`` on this machine; tried once a process and dtype.

    Examples
    --------
    >>> agrees(torch.bfloat16)
    False
    """
    if dtype not in (torch.float32, torch.float64):
        return False
    generator = torch.Generator().manual_seed(0)  # the user's own random numbers stay as they are
    sizes = (0, 1, 7, 64, 1031)  # whole vectors, tails, and both together
    averages = [torch.randn(size, generator=generator, dtype=dtype) for size in sizes]
    values = [torch.randn(size, generator=generator, dtype=dtype) for size in sizes]
    kept = [value.clone() for value in values]
    expected = [average.clone() for average in averages]
    with torch.no_grad():
        try:
            for weight in (0.001, 0.3, 0.4999):
                torch._foreach_lerp_(expected, values, weight)
                blend_(averages, values, weight)
        except (AttributeError, NotImplementedError, RuntimeError, TypeError):
            return False  # this torch has no such operation, or another signature; it promised neither
    return all(map(torch.equal, averages + values, expected + kept))
