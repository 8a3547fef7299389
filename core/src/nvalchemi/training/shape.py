"""The shape of data that comes from elsewhere: which entries there must be, and of which types."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Each", "misfit"]


@dataclass(frozen=True)
class Each:
    """The shape of a mapping by strings whose entries all have one shape."""

    entry: Any


def misfit(value: Any, shape: Any, where: str) -> str:
    """Return what does not fit, in words, or an empty string.

    Parameters
    ----------
    value : Any
        The data.
    shape : Any
        A type that it must be exactly, None, ``object`` for anything, a tuple of alternatives, ``[shape]`` for a list,
        `Each` for a mapping, or a dict of the entries that a mapping must have; it may have others too.
    where : str
        What to call the data.

    Examples
    --------
    >>> shape = {"step": int, "names": Each((str, None))}
    >>> misfit({"step": 3, "names": {}, "more": 1}, shape, "state")
    ''
    >>> misfit({"step": True, "names": {}}, shape, "state")
    "state['step'] is True, a bool, instead of an int"
    >>> misfit({"step": 3}, shape, "state")
    "state has no 'names'"
    """
    if isinstance(shape, tuple):
        found = [misfit(value, one, where) for one in shape]
        return "" if "" in found else found[0]
    if isinstance(shape, list):
        wrong = _instead(value, "a list", where) if type(value) is not list else ""
        return wrong or _first(misfit(one, shape[0], f"{where}[{place}]") for place, one in enumerate(value))
    if isinstance(shape, Each | dict):
        if not isinstance(value, Mapping):
            return _instead(value, "a mapping", where)
        return _misfit_inside(value, shape, where)
    if shape is None:
        return "" if value is None else _instead(value, "None", where)
    fits = shape is object or type(value) is shape
    return "" if fits else _instead(value, _a(shape), where)


def _misfit_inside(value: Mapping[Any, Any], shape: Each | dict[str, Any], where: str) -> str:
    if isinstance(shape, dict):
        missing = [f"{where} has no {key!r}" for key in shape if key not in value]
        return _first(missing) or _first(misfit(value[key], one, f"{where}[{key!r}]") for key, one in shape.items())
    keys = _first(f"{where} has the key {key!r}, which is no string" for key in value if type(key) is not str)
    return keys or _first(misfit(one, shape.entry, f"{where}[{key!r}]") for key, one in value.items())


def _first(found: Any) -> str:
    return next(filter(None, found), "")


def _instead(value: object, expected: str, where: str) -> str:
    return f"{where} is {reprlib.repr(value)}, {_a(type(value))}, instead of {expected}"


def _a(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'aeiou' else 'a'} {kind.__name__}"
