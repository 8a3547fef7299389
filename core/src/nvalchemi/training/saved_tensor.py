"""Tensors of a sharded checkpoint, read once it is known which part of them is wanted, and how."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor

from nvalchemi.errors import NotPlainDataError
from nvalchemi.training.sharding import is_sharded, like_sharded

__all__ = ["SavedTensor", "placed", "placed_moments", "put_in", "take_out"]

_MARK = "nvalchemi:sharded"  # the only key of a dict that stands for a tensor kept elsewhere


class SavedTensor:
    """A tensor that several ranks have saved, each its own part.

    Parameters
    ----------
    shape : torch.Size
        Of the whole tensor.
    dtype : torch.dtype
        Its dtype.
    read : callable
        ``read(like)`` reads it: whole for None or a tensor that is not sharded, else the part that this rank holds of
        one that is spread over ranks like `like`.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, read: Callable[[Tensor | None], Tensor]) -> None:
        self.shape, self.dtype, self.read = shape, dtype, read


def take_out(section: Any, name: str, taken: dict[str, Tensor]) -> Any:
    """Return plain data with a mark for every sharded tensor, which goes into `taken` under a name of its own.

    Parameters
    ----------
    section : Any
        Plain data, and sharded tensors.
    name : str
        Where it is; names begin with it.
    taken : dict of str to torch.Tensor
        What was taken out so far.

    Raises
    ------
    NotPlainDataError
        A ``TypeError``: a dict has the key that marks such tensors.
    """
    if is_sharded(section):
        key = name
        while key in taken:
            key += "'"
        taken[key] = section
        return {_MARK: key}
    if type(section) in (dict, OrderedDict):
        if _MARK in section:
            raise NotPlainDataError(f"{name} has the key {_MARK!r}, which marks sharded tensors; use another one.")
        return type(section)((key, take_out(item, f"{name}.{key}", taken)) for key, item in section.items())
    if type(section) in (list, tuple):
        return type(section)(take_out(item, f"{name}.{place}", taken) for place, item in enumerate(section))
    return section


def put_in(section: Any, tensors: Mapping[str, SavedTensor]) -> Any:
    """Undo `take_out`, with tensors that are read later; a KeyError names one that is not there."""
    if type(section) in (dict, OrderedDict):
        if set(section) == {_MARK}:
            return tensors[section[_MARK]]
        return type(section)((key, put_in(item, tensors)) for key, item in section.items())
    if type(section) in (list, tuple):
        return type(section)(put_in(item, tensors) for item in section)
    return section


def placed(saved: Any, like: Any = None) -> Any:
    """Return saved data with its tensors spread over ranks as those of `like` at the same places are.

    A tensor whose shape differs comes back without values, for whoever compares shapes; nothing communicates.

    Parameters
    ----------
    saved : Any
        Plain data, `SavedTensor`s, and tensors that every rank holds whole.
    like : Any
        Data of the same form, as far as it goes; where it has no tensor, tensors are whole.

    Examples
    --------
    >>> placed({"weight": torch.ones(1), "step": 3}, {"weight": torch.zeros(1)})
    {'weight': tensor([1.]), 'step': 3}
    """
    if _is_saved(saved):
        if isinstance(like, Tensor) and like.shape != saved.shape:
            return torch.empty(saved.shape, dtype=saved.dtype, device="meta")
        return saved.read(like if isinstance(like, Tensor) else None)
    if isinstance(saved, Tensor):
        return like_sharded(saved, like) if is_sharded(like) and like.shape == saved.shape else saved
    if type(saved) in (dict, OrderedDict):
        known = like if isinstance(like, Mapping) else {}
        return type(saved)((key, placed(item, known.get(key))) for key, item in saved.items())
    if type(saved) in (list, tuple):
        items = like if type(like) is type(saved) and len(like) == len(saved) else [None] * len(saved)
        return type(saved)(map(placed, saved, items))
    return saved


def placed_moments(moments: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return what an optimizer keeps of a parameter; what has the shape of the parameter is spread as it is."""
    return {
        key: placed(value, parameter if getattr(value, "shape", None) == parameter.shape else None)
        for key, value in moments.items()
    }


def _is_saved(value: object) -> TypeGuard[SavedTensor]:
    return isinstance(value, SavedTensor)
