"""What the hook can be told, checked when it is told."""

from __future__ import annotations

import math
from numbers import Real

__all__ = ["checked_choice", "checked_count", "checked_number"]


def checked_choice(field: str, value: object, choices: tuple[str, ...]) -> str:
    """Return one of some words.

    Raises
    ------
    ValueError
        It is none of them.

    Examples
    --------
    >>> checked_choice("on_limit", "halt", ("restart", "stop"))
    Traceback (most recent call last):
    ...
    ValueError: SpikeSkipHook: on_limit is 'halt'; give one of 'restart', 'stop'
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"SpikeSkipHook: {field} is {value!r}; give one of {', '.join(map(repr, choices))}")
    return value


def checked_count(field: str, value: object, remedy: str, *, most: int | None = None) -> int:
    """Return an int of 1 or above, up to `most`.

    Raises
    ------
    ValueError
        It is a bool, no int, or out of range.

    Examples
    --------
    >>> checked_count("window", 128, "give an int of 1 or above")
    128
    """
    if type(value) is not int or value < 1 or (most is not None and value > most):
        raise ValueError(f"SpikeSkipHook: {field} is {value!r}; {remedy}")
    return value


def checked_number(field: str, value: object, least: float, remedy: str) -> float:
    """Return a finite number from `least` on as a float.

    Raises
    ------
    ValueError
        It is a bool, no number, not finite, or below `least`.

    Examples
    --------
    >>> checked_number("min_ratio", 2, 1.0, "give a number of 1 or above")
    2.0
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        number = float(value)
        if math.isfinite(number) and number >= least:
            return number
    raise ValueError(f"SpikeSkipHook: {field} is {value!r}; {remedy}")
