"""Lists of tensors at once, with torch's own multi-tensor operations.

Each list holds tensors of one device and one dtype. The weight is a Python float: as a 0-dim tensor it would be read by
the host, which waits for the device. Under a veto the new bits are computed beside the old ones, and integer arithmetic
chooses between the two: exact whatever the bits mean, inf and nan included, in as many launches for a thousand tensors
as for one.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["blend_", "copy_"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element


def blend_(averages: list[Tensor], values: list[Tensor], weight: float, veto: Tensor | None = None) -> None:
    """Move every average towards its value, in place: ``average += weight * (value - average)``.

    Parameters
    ----------
    averages, values : lists of torch.Tensor
        Equally long, pairwise of one shape; floating or complex, all of one dtype.
    weight : float
        1 - decay. The numbers are those of `torch.optim.swa_utils.get_ema_multi_avg_fn`, bit for bit.
    veto : torch.Tensor, optional
        0-dim on the device of the lists, exactly 0 or 1. With 1 no bit of an average changes.

    Examples
    --------
    >>> average = torch.tensor([1.0])
    >>> blend_([average], [torch.tensor([3.0])], 0.5)
    >>> blend_([average], [torch.tensor([torch.nan])], 0.5, veto=torch.tensor(1.0))
    >>> average
    tensor([2.])
    """
    if veto is None:
        torch._foreach_lerp_(averages, values, weight)
    else:
        _write_unless(veto, averages, list(torch._foreach_lerp(averages, values, weight)))


def copy_(averages: list[Tensor], values: list[Tensor], veto: Tensor | None = None) -> None:
    """Copy every value into its average.

    Parameters
    ----------
    averages, values : lists of torch.Tensor
        Equally long, pairwise of one shape; any dtype, but under a veto the same for both.
    veto : torch.Tensor, optional
        0-dim on the device of the lists, exactly 0 or 1. With 1 no bit of an average changes.

    Examples
    --------
    >>> average = torch.tensor([1])
    >>> copy_([average], [torch.tensor([3])])
    >>> copy_([average], [torch.tensor([5])], veto=torch.tensor(1.0))
    >>> average
    tensor([3])
    """
    if veto is None:
        torch._foreach_copy_(averages, values)
    else:
        _write_unless(veto, averages, values)


def _write_unless(veto: Tensor, averages: list[Tensor], values: list[Tensor]) -> None:
    """Write values into averages, or multiply the difference of their bits by 0: integers wrap, so both are exact."""
    old, new = list(map(_bits, averages)), list(map(_bits, values))
    change = torch._foreach_sub(new, old)
    torch._foreach_mul_(change, veto.eq(0).to(old[0].dtype))
    torch._foreach_add_(old, change)


def _bits(tensor: Tensor) -> Tensor:
    """Return the same memory as integers."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.detach().view(_BITS[tensor.element_size()])
