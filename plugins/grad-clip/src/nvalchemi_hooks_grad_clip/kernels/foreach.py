"""Clipping without waiting for the device."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["clamp_", "clip_divisor", "first_nonfinite", "largest_divisor", "largest_usable"]

_EPSILON = 1e-6  # that of torch.nn.utils.clip_grad_norm_


def clip_divisor(norm: Tensor, max_norm: float) -> Tensor:
    r"""Return what to divide gradients by so that their norm becomes `max_norm` at most.

    :math:`d = \max(1, (n + 10^{-6}) / n_{max})`, the reciprocal of the factor of Pascanu et al. (2013) with the
    epsilon of ``torch.nn.utils.clip_grad_norm_``.

    Parameters
    ----------
    norm : torch.Tensor
        0-dim, the norm of all gradients: float64 if they are, else float32.
    max_norm : float
        Above 0; inf gives the divisor 1.

    Returns
    -------
    torch.Tensor
        0-dim, of the norm's dtype; finite where the norm is.

    Examples
    --------
    >>> import torch
    >>> round(clip_divisor(torch.tensor(5.0), max_norm=2.0).item(), 4)
    2.5
    """
    divisor = norm.add(_epsilon(norm.dtype))
    if max_norm != 1.0:
        divisor.div_(max_norm)
    return divisor.clamp_min_(1.0)


@functools.cache
def _epsilon(dtype: torch.dtype) -> Tensor:
    """Return epsilon as a tensor on the host, which every device takes as a number, and is not made anew each time."""
    return torch.tensor(_EPSILON, dtype=dtype)


@functools.cache
def largest_usable(dtype: torch.dtype, max_norm: float, norm_type: float = 2.0) -> float:
    """Return the norm above which its sum of powers, or the divisor, would not fit into `dtype`.

    Examples
    --------
    >>> import torch
    >>> f"{largest_usable(torch.float32, max_norm=1.0):.2g}"
    '1.8e+19'
    """
    largest = torch.finfo(dtype).max
    power = 1.0 if math.isinf(norm_type) else max(1.0, norm_type)
    return float(min(largest ** (1.0 / power), largest * max_norm))


@functools.cache
def largest_divisor(dtype: torch.dtype, max_norm: float, norm_type: float = 2.0) -> float:
    """Return what `clip_divisor` cannot be above, for a norm that is usable."""
    return (largest_usable(dtype, max_norm, norm_type) + _EPSILON) / max_norm


def clamp_(tensors: Sequence[Tensor], limit: float, unless: Tensor) -> None:
    """Cut every element to ``[-limit, limit]`` in place, or leave all as they are if `unless` is True.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        Real, floating.
    limit : float
        Above 0.
    unless : torch.Tensor
        0-dim bool, on the device of any of the tensors; the host does not wait for it. An inf that is about to be
        vetoed stays an inf, so that whoever looks for the culprit finds it.

    Examples
    --------
    >>> import torch
    >>> gradient = torch.tensor([-3.0, 0.5])
    >>> clamp_([gradient], 1.0, unless=torch.tensor(False))
    >>> gradient
    tensor([-1.0000,  0.5000])
    """
    bounds: dict[tuple[torch.device, torch.dtype], Tensor] = {}
    for tensor in tensors:
        kind = tensor.device, tensor.dtype
        if kind not in bounds:
            bound = torch.full((), min(limit, torch.finfo(tensor.dtype).max), device=tensor.device, dtype=tensor.dtype)
            bounds[kind] = bound.masked_fill_(unless.to(tensor.device), math.inf)
        tensor.clamp_(min=-bounds[kind], max=bounds[kind])


def first_nonfinite(tensors: Sequence[Tensor]) -> int | None:
    """Return the place of the first tensor with an element that is inf or nan, or None; the host waits for it.

    Sparse tensors count by their values.

    Examples
    --------
    >>> import torch
    >>> first_nonfinite([torch.ones(2), torch.tensor([1.0, torch.nan])])
    1
    """
    dense = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]
    places = [place for place, tensor in enumerate(dense) if tensor.numel() > 0]
    if not places:
        return None
    largest = torch._foreach_norm([dense[place] for place in places], math.inf)  # cannot overflow, unlike a sum
    finite = torch.stack([norm.isfinite().to(largest[0].device) for norm in largest]).tolist()
    return next((place for place, fine in zip(places, finite, strict=True) if not fine), None)
