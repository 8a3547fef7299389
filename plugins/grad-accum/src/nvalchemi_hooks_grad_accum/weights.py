"""What a micro-batch counts for among those of its window."""

from __future__ import annotations

import importlib
import math
import pickle
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, NoReturn

import torch

__all__ = ["Weight", "checked_weight", "weight_of"]

Weight = str | Callable[[Any], Any] | None


def checked_weight(weight: Weight) -> Callable[[Any], Any] | None:
    """Return who weighs a batch; None where all count the same.

    Parameters
    ----------
    weight : str, callable or None
        ``"package.module:function"``, the name of an entry or an attribute of the batch, or a function that pickle can
        name.

    Raises
    ------
    ValueError, TypeError
        There is no such function, or it cannot be carried to another process.
    """
    if weight is None:
        return None
    if isinstance(weight, str) and weight:
        return _imported(weight) if ":" in weight else _Named(weight)
    if not callable(weight):
        _refuse(weight)
    try:
        pickle.dumps(weight)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"GradientAccumulationHook: weight is {weight!r}, which cannot be carried to another process ({error}); "
            "define it with def in a module."
        ) from error
    return weight


def weight_of(batch: Any, weigh: Callable[[Any], Any]) -> float:
    """Return what a batch counts for.

    Raises
    ------
    ValueError, TypeError
        It is no finite number above 0.
    """
    value = weigh(batch)
    if isinstance(value, torch.Tensor):
        value = value.sum().item() if value.dim() <= 1 else value
    if isinstance(value, bool) or not isinstance(value, Real):  # numbers of numpy are real numbers, too
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise TypeError(
            f"GradientAccumulationHook: the weight of a batch is {got}; give a number, or a tensor of numbers of at "
            "most one dimension, which are added up."
        )
    number = float(value)
    if not 0.0 < number < math.inf:
        raise ValueError(
            f"GradientAccumulationHook: the weight of a batch is {value!r}; it must be finite and above 0."
        )
    return number


class _Named:
    """An entry or an attribute of the batch."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, batch: Any) -> Any:
        if isinstance(batch, Mapping) and self._name in batch:
            return batch[self._name]
        if not hasattr(batch, self._name):
            raise ValueError(
                f"GradientAccumulationHook: weight is {self._name!r}, but the batch, a {type(batch).__name__}, has no "
                "entry and no attribute of that name; name one that it has, or give a function of the batch."
            )
        return getattr(batch, self._name)


def _imported(path: str) -> Callable[[Any], Any]:
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"GradientAccumulationHook: weight is {path!r}, but there is no such function ({error}); give "
            "'package.module:function'."
        ) from error
    if not callable(function):
        _refuse(path)
    return function  # type: ignore[no-any-return]


def _refuse(weight: object) -> NoReturn:
    raise TypeError(
        f"GradientAccumulationHook: weight is {weight!r}; give a function of the batch, its import path "
        "'package.module:function', or the name of an entry or an attribute of the batch."
    )
