"""The rule of dynamic loss scaling, literally; the oracle of the version on tensors."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

__all__ = ["ScaleRule", "advance"]


@dataclass(frozen=True, slots=True)
class ScaleRule:
    """By how much, how often and how far a scale moves.

    Parameters
    ----------
    growth_factor : float
        What the scale is multiplied by after `growth_interval` good windows in a row.
    backoff_factor : float
        What it is multiplied by after a window with inf or nan.
    growth_interval : int
        Good windows in a row before the scale grows.
    min_scale, max_scale : float
        The scale stays between them.
    """

    growth_factor: float
    backoff_factor: float
    growth_interval: int
    min_scale: float
    max_scale: float


def advance(scale: float, growth_tracker: int, found_inf: bool, rule: ScaleRule) -> tuple[float, int]:
    r"""Return the scale and the growth tracker after one window.

    With inf or nan, :math:`s \leftarrow \max(s_{min}, b\,s)` and :math:`n \leftarrow 0`. Otherwise :math:`n` counts
    up, and at :math:`n = N` the scale grows, :math:`s \leftarrow \min(s_{max}, g\,s)`, and :math:`n \leftarrow 0`.
    Scales are float32; a growth that float32 cannot hold is left out.

    Parameters
    ----------
    scale : float
        The scale of the window that ends, a float32 value.
    growth_tracker : int
        Good windows in a row so far.
    found_inf : bool
        Whether some gradient of the window was inf or nan.
    rule : ScaleRule
        The constants.

    Returns
    -------
    scale : float
        The scale of the next window, a float32 value.
    growth_tracker : int
        Good windows in a row, this one included; 0 after a growth or a back-off.

    References
    ----------
    P. Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2; the rule of ``torch.amp.GradScaler``.

    Examples
    --------
    >>> rule = ScaleRule(growth_factor=2.0, backoff_factor=0.5, growth_interval=2, min_scale=1.0, max_scale=16.0)
    >>> advance(8.0, 1, False, rule), advance(8.0, 1, True, rule)
    ((16.0, 0), (4.0, 0))
    """
    if found_inf:
        return _within(rule, _float32(scale * rule.backoff_factor)), 0
    if growth_tracker + 1 != rule.growth_interval:
        return scale, growth_tracker + 1
    grown = _float32(scale * rule.growth_factor)
    return _within(rule, grown if math.isfinite(grown) else scale), 0


def _within(rule: ScaleRule, scale: float) -> float:
    return min(max(scale, _float32(rule.min_scale)), _float32(rule.max_scale))


def _float32(number: float) -> float:
    try:
        return float(struct.unpack("f", struct.pack("f", number))[0])
    except OverflowError:  # how `pack` says that float32 rounds it to infinity
        return math.inf
