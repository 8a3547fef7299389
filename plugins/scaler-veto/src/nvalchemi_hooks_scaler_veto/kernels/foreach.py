"""The first tensor that is not finite, from the largest elements of all."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["first_nonfinite"]


def first_nonfinite(tensors: Sequence[Tensor]) -> int | None:
    """Return the place of the first tensor with an element that is inf or nan, or None.

    One pass over the tensors and one wait of the host, however many there are.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        Any floating or complex dtypes, on any devices; sparse ones count by their values.

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
