"""Clipping as it stands in the books: one number at a time, in double precision. Slow, and the oracle of the others."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["clip", "first_nonfinite", "vector_norm"]


def vector_norm(tensors: Sequence[Tensor], norm_type: float = 2.0) -> float:
    """Return ``(sum |g| ** p) ** (1 / p)`` over all elements, or their maximum if p is inf."""
    sizes = [abs(element) for tensor in tensors for element in tensor.double().flatten().tolist()]
    if any(map(math.isnan, sizes)):
        return math.nan
    largest = max(sizes, default=0.0)
    if math.isinf(norm_type) or largest in (0.0, math.inf):
        return largest
    return float(largest * sum((size / largest) ** norm_type for size in sizes) ** (1.0 / norm_type))


def clip(
    tensors: Sequence[Tensor], max_norm: float = math.inf, norm_type: float = 2.0, clip_value: float = math.inf
) -> tuple[list[Tensor], bool]:
    """Return the clipped gradients, and whether the step must be vetoed because their norm is not finite.

    ``g / max(1, (norm + 1e-6) / max_norm)``, then each element cut to ``[-clip_value, clip_value]``. Gradients whose
    norm is not finite, or whose sum of powers would overflow in their own precision, come back as they were.
    """
    norm = vector_norm(tensors, norm_type)
    wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    power = 1.0 if math.isinf(norm_type) else max(1.0, norm_type)
    measured, largest = torch.tensor([norm, torch.finfo(wide).max ** (1.0 / power)], dtype=wide)
    if not measured <= largest:
        return list(tensors), True
    divisor = max(1.0, (norm + 1e-6) / max_norm)
    return [(t.double() / divisor).clamp(-clip_value, clip_value).to(t.dtype) for t in tensors], False


def first_nonfinite(tensors: Sequence[Tensor]) -> int | None:
    """Return the place of the first tensor with an element that is inf or nan, or None."""
    for place, tensor in enumerate(tensors):
        if not all(math.isfinite(element) for element in tensor.double().flatten().tolist()):
            return place
    return None
