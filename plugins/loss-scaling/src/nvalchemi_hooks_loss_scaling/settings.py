"""What a loss scaler can be told, checked when it is told."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypedDict

from nvalchemi_hooks_loss_scaling.kernels.reference import ScaleRule

__all__ = ["ScalingOptions", "ScalingSettings"]

_SMALLEST, _LARGEST = 2.0**-126, 2.0**64  # a normal number of float32, and what leaves room for a clipping factor
_LONGEST = 2**31 - 1  # the growth tracker is an int32


class ScalingOptions(TypedDict, total=False):
    """The keyword arguments of everything that scales a loss; `ScalingSettings` describes them."""

    scale: float | Literal["dynamic"]
    init_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    min_scale: float
    max_scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingSettings:
    """How a loss is scaled. Powers of two keep scaling exact; other factors round once a step.

    Parameters
    ----------
    scale : float or "dynamic"
        A number scales by it, always; then the other settings have no effect.
    init_scale : float
        The scale to start from.
    growth_factor : float
        Above 1: what the scale is multiplied by after `growth_interval` good windows in a row.
    backoff_factor : float
        Between 0 and 1: what it is multiplied by after a window with inf or nan.
    growth_interval : int
        At least 1: good windows in a row before the scale grows.
    min_scale : float
        The floor, above 0: a run that sees nothing but nan keeps a scale from which it can recover.
    max_scale : float
        The ceiling: the scale of tiny losses stops here instead of growing to infinity.

    Raises
    ------
    ValueError
        A setting is out of its range, not a number, or a bool: named with its value and the remedy.

    Examples
    --------
    >>> ScalingSettings().init_scale
    65536.0
    >>> ScalingSettings(growth_factor=1.0)
    Traceback (most recent call last):
    ...
    ValueError: Loss scaling: growth_factor is 1.0; give a finite number above 1, such as 2.0.
    """

    scale: float | Literal["dynamic"] = "dynamic"
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**32

    def __post_init__(self) -> None:
        if self.scale != "dynamic":
            _check(
                "scale",
                self.scale,
                _SMALLEST <= _number(self.scale) <= _LARGEST,
                "'dynamic' or a number above 0, at most 2**64",
            )
        for name in ("init_scale", "min_scale", "max_scale"):
            value = getattr(self, name)
            _check(name, value, _SMALLEST <= _number(value) <= _LARGEST, "a number above 0, at most 2**64")
        growth, backoff, interval = self.growth_factor, self.backoff_factor, self.growth_interval
        _check("growth_factor", growth, 1 < _number(growth) < math.inf, "a finite number above 1, such as 2.0")
        _check("backoff_factor", backoff, 0 < _number(backoff) < 1, "a number between 0 and 1, such as 0.5")
        whole = type(interval) is int and 1 <= interval <= _LONGEST
        _check("growth_interval", interval, whole, f"an int from 1 to {_LONGEST}, such as 2000")
        low, first, high = self.min_scale, self.init_scale, self.max_scale
        _check("min_scale", low, low <= first, f"at most init_scale, which is {first!r}")
        _check("max_scale", high, high >= first, f"at least init_scale, which is {first!r}")

    @property
    def dynamic(self) -> bool:
        """Whether the scale moves."""
        return self.scale == "dynamic"

    @property
    def first_scale(self) -> float:
        """The scale before any window has closed."""
        return float(self.init_scale if self.scale == "dynamic" else self.scale)

    @property
    def rule(self) -> ScaleRule:
        """The constants of the rule by which the scale moves."""
        return ScaleRule(
            growth_factor=float(self.growth_factor),
            backoff_factor=float(self.backoff_factor),
            growth_interval=self.growth_interval,
            min_scale=float(self.min_scale),
            max_scale=float(self.max_scale),
        )

    def to_state(self) -> dict[str, Any]:
        """Return what a resumed run has to share: the mode, and for a dynamic scale its rule."""
        return {"dynamic": True, **asdict(self.rule)} if self.dynamic else {"dynamic": False}

    def refuse_others(self, state: Mapping[str, Any]) -> None:
        """Refuse a saved state whose settings are not these; what it does not hold is not compared.

        Raises
        ------
        ValueError
            The first setting that differs, with both values.
        """
        for name, own in self.to_state().items():
            if name in state and state[name] != own:
                raise ValueError(
                    f"Loss scaling: {name} is {state[name]!r} in the saved state and {own!r} here; use the saved "
                    f"value, or leave {name!r} out of the state to go on with {own!r}."
                )


def _number(value: object) -> float:
    """Return a number as a float, and nan for what is none: no range holds it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an int beyond all floats
        return math.inf


def _check(name: str, value: object, holds: bool, wanted: str) -> None:
    if not holds:
        raise ValueError(f"Loss scaling: {name} is {value!r}; give {wanted}.")
