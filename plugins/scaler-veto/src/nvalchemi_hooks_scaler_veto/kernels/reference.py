"""Literally: the first tensor with an element that is not a finite number."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["first_nonfinite"]


def first_nonfinite(tensors: Sequence[Tensor]) -> int | None:
    """Return the place of the first tensor with an element that is inf or nan, or None."""
    for place, tensor in enumerate(tensors):
        if any(element - element != 0 for element in tensor.to_dense().flatten().tolist()):  # only inf and nan do
            return place
    return None
