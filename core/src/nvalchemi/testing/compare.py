"""Comparing states: bit for bit, with the place of the first difference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["first_difference"]


def first_difference(one: Any, other: Any, where: str = "state", *, tolerance: float = 0.0) -> str:
    """Say where two values differ first; empty if they are equal. nan equals nan.

    Parameters
    ----------
    one, other : Any
        Tensors, numbers, strings, and dicts, lists and tuples of them.
    where : str
        What to call it.
    tolerance : float
        How far floating tensors may differ, relative to their largest element.

    Examples
    --------
    >>> first_difference({"a": [1, 2]}, {"a": [1, 3]})
    "state['a'][1]: 2 and 3"
    >>> first_difference({"a": torch.ones(2)}, {"a": torch.ones(2)})
    ''
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if set(one) != set(other):
            return f"{where}: only one of them has {sorted(map(str, set(one) ^ set(other)))}"
        pairs = ((f"{where}[{key!r}]", one[key], other[key]) for key in one)
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = ((f"{where}[{place}]", a, b) for place, (a, b) in enumerate(zip(one, other, strict=True)))
    elif isinstance(one, Tensor) and isinstance(other, Tensor):
        return "" if _equal_tensors(one, other, tolerance) else f"{where}: {_short(one)} and {_short(other)}"
    else:
        equal = type(one) is type(other) and (one == other or (one != one and other != other))
        return "" if equal else f"{where}: {_short(one)} and {_short(other)}"
    return next((text for place, a, b in pairs if (text := first_difference(a, b, place, tolerance=tolerance))), "")


def _equal_tensors(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    one, other = (tensor.detach().cpu().to_dense() for tensor in (one, other))
    if not one.is_floating_point():
        return torch.equal(one, other)
    largest = one.abs().nan_to_num(0.0, posinf=0.0).amax() if tolerance and one.numel() else torch.zeros(())
    return torch.allclose(one, other, rtol=0.0, atol=tolerance * float(largest), equal_nan=True)


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."
