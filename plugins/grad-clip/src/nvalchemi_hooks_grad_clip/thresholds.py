"""What the hook can be told, checked when it is told."""

from __future__ import annotations

import math
from numbers import Real

__all__ = ["checked_switch", "checked_threshold"]


def checked_threshold(field: str, value: object, remedy: str) -> float:
    """Return a threshold as a float.

    Parameters
    ----------
    field : str
        What the user calls it.
    value : object
        A number above 0, inf included.
    remedy : str
        What to give instead.

    Raises
    ------
    ValueError
        It is 0 or below, nan, a bool or no number at all.

    Examples
    --------
    >>> checked_threshold("max_norm", 2, "give a number above 0")
    2.0
    >>> checked_threshold("max_norm", 0, "give a number above 0")
    Traceback (most recent call last):
    ...
    ValueError: GradientClipHook: max_norm is 0; give a number above 0
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        number = float(value)
        if number > 0.0 and not math.isnan(number):
            return number
    raise ValueError(f"GradientClipHook: {field} is {value!r}; {remedy}")


def checked_switch(field: str, value: object) -> bool:
    """Return a switch; what only looks like one ("no", 0) is refused.

    Raises
    ------
    ValueError
        It is no bool.

    Examples
    --------
    >>> checked_switch("per_optimizer", True)
    True
    """
    if not isinstance(value, bool):
        raise ValueError(f"GradientClipHook: {field} is {value!r}; give True or False")
    return value
