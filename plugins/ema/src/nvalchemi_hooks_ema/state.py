"""States: plain data out, and nothing in that does not fit."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from nvalchemi_hooks_ema.pairing import prefix_between

__all__ = ["plain_copy", "refuse_other_settings", "refuse_other_weights", "renamed", "update_count"]


def plain_copy(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state as a plain dict whose tensors are copies, on the device where they are.

    Examples
    --------
    >>> from torch import nn, zeros
    >>> plain_copy({"weight": nn.Parameter(zeros(1)), "version": 2})
    {'weight': tensor([0.]), 'version': 2}
    """
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in state.items()
    }


def renamed(state: Mapping[str, Any], names: Collection[str], *, below: str) -> dict[str, Any]:
    """Return a state with a wrapper's prefix taken off or put on, where that gives it the wanted names.

    Parameters
    ----------
    state : mapping of str to Any
        What is to be renamed.
    names : collection of str
        The names that are wanted.
    below : str
        Only names that begin with this are renamed, behind it.

    Examples
    --------
    >>> renamed({"n": 1, "module.module.w": 2}, ["n", "module.w"], below="module.")
    {'n': 1, 'module.w': 2}
    """
    inner = {name.removeprefix(below) for name in state if name.startswith(below)}
    wanted = {name.removeprefix(below) for name in names if name.startswith(below)}
    off, on = prefix_between(inner, wanted), prefix_between(wanted, inner)
    old, new = below + (off or ""), below + (on or "")
    return {new + name.removeprefix(old) if name.startswith(below) else name: value for name, value in state.items()}


def refuse_other_settings(own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Refuse a state whose settings differ from a hook's own; absent ones are ignored.

    Raises
    ------
    ValueError
        Both values of the first setting that differs are named.
    """
    for name, value in own.items():
        if name in state and state[name] != value:
            raise ValueError(
                f"EMAHook cannot load a state with {name}={state[name]!r} into a hook with {name}={value!r}; "
                f"make the hook with {name}={state[name]!r}."
            )


def update_count(state: Mapping[str, Any], default: int) -> int:
    """Return the number of updates in a state, or `default` where it is absent.

    Raises
    ------
    ValueError
        It is no int from 0 on.
    """
    count = state.get("num_updates", default)
    if type(count) is not int or count < 0:
        raise ValueError(f"EMAHook cannot load a state with num_updates={count!r}; it must be an int, at least 0.")
    return count


def refuse_other_weights(state: Mapping[str, Any], needed: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuse averaged weights that are those of another model.

    Parameters
    ----------
    state : mapping of str to Any
        What is to be loaded.
    needed, known : mapping of str to Any
        What has to be there, and what may be.

    Raises
    ------
    ValueError
        Names or shapes differ.
    """
    missing, unknown = sorted(set(needed) - set(state)), sorted(set(state) - set(known))
    if missing or unknown:
        raise ValueError(
            f"EMAHook cannot load averaged_model_state: it lacks {missing[:3] or 'nothing'} of the averaged model and "
            f"has {unknown[:3] or 'nothing'} besides. Load it into a hook of the same model."
        )
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape != known[name].shape:
            raise ValueError(
                f"EMAHook cannot load averaged_model_state: {name!r} has shape {tuple(value.shape)} there and "
                f"{tuple(known[name].shape)} in the averaged model. Load it into a hook of the same model."
            )
