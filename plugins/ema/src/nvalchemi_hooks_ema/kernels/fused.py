"""The same blend in one pass over all tensors, borrowed from torch's fused SGD.

SGD with the average as its parameter, the value as its gradient, a weight decay of -1 and a learning rate of -weight
computes ``average += weight * (value - average)``, and its `found_inf` is a veto that no host has to read. On a CPU,
where ``torch._foreach_lerp_`` is a loop, it has less overhead a tensor as well.

The operation is private to torch, and for half precision on a CPU it is wrong in torch 2.13. So it is used for float32
and float64 only, and only after `agrees` has seen the very bits of ``torch._foreach_lerp_`` on the same kind of device.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

__all__ = ["BRANCH_OF_LERP", "agrees", "blend_", "takes"]

BRANCH_OF_LERP = 0.5  # from here on lerp computes value - (1 - weight) * (value - average), which rounds differently


def blend_(averages: list[Tensor], values: list[Tensor], weight: float, veto: Tensor | None = None) -> None:
    """Move every average towards its value, in place, as `foreach.blend_` does.

    Parameters
    ----------
    averages, values : lists of torch.Tensor
        float32 or float64, contiguous, all of one dtype and on one device. The values are not changed.
    weight : float
        1 - decay, below 0.5.
    veto : torch.Tensor, optional
        0-dim float32 on that device, exactly 0 or 1. With 1 nothing is written.

    Examples
    --------
    >>> average = torch.tensor([1.0])
    >>> blend_([average], [torch.tensor([3.0])], 0.25)
    >>> blend_([average], [torch.tensor([torch.inf])], 0.25, veto=torch.tensor(1.0))
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
        found_inf=veto,
    )


def takes(average: Tensor, value: Tensor, weight: float) -> bool:
    """Return whether `blend_` may be used for a pair of tensors.

    Examples
    --------
    >>> takes(torch.zeros(2), torch.ones(2), 0.9)
    False
    """
    return (
        weight < BRANCH_OF_LERP
        and average.device == value.device
        and average.dtype == value.dtype
        and average.is_contiguous()
        and value.is_contiguous()
        and agrees(average.dtype, average.device.type)
    )


@cache
def agrees(dtype: torch.dtype, device: str = "cpu") -> bool:
    """Return whether `blend_` has the bits of ``torch._foreach_lerp_`` here, and keeps to a veto.

    Tried once a process, dtype and kind of device; on a GPU that waits for it, so it is asked when lists are prepared.

    Examples
    --------
    >>> agrees(torch.bfloat16)
    False
    """
    if dtype not in (torch.float32, torch.float64) or device not in ("cpu", "cuda"):
        return False
    generator = torch.Generator().manual_seed(0)  # the user's own random numbers stay as they are
    sizes = (0, 1, 7, 64, 1031)  # whole vectors, tails, and both together
    columns = [[torch.randn(size, generator=generator, dtype=dtype) for size in sizes] for _ in range(2)]
    try:
        with torch.no_grad():
            averages, values = ([tensor.to(device) for tensor in column] for column in columns)
            kept, expected = ([tensor.clone() for tensor in column] for column in (values, averages))
            go, stop = torch.zeros((), device=device), torch.ones((), device=device)
            for weight, veto in ((0.001, None), (0.3, go), (0.4999, None), (0.3, stop)):
                blend_(averages, values, weight, veto)
                if veto is not stop:
                    torch._foreach_lerp_(expected, values, weight)
            return all(map(torch.equal, averages + values, expected + kept))
    except (AssertionError, AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False  # this torch has no such operation, another signature, or no such device; it promised none of them
