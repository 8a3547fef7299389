"""The rule of dynamic loss scaling on tensors: nothing is read by the host."""

from __future__ import annotations

import torch
from torch import Tensor

from nvalchemi_hooks_loss_scaling.kernels.reference import ScaleRule

__all__ = ["advance", "bound"]


def advance(scale: Tensor, growth_tracker: Tensor, found_inf: Tensor, rule: ScaleRule) -> None:
    """Move the scale on after one window and count the window, both in place, in one launch.

    It is the operator with which ``torch.amp.GradScaler`` updates, so both agree bit for bit. The bounds are left to
    `bound`, which has to follow before the scale is used.

    Parameters
    ----------
    scale : torch.Tensor
        0-dim float32: the scale of the window that ends.
    growth_tracker : torch.Tensor
        0-dim int32 on the same device: good windows in a row.
    found_inf : torch.Tensor
        0-dim float32 on the same device: 0 for a good window, anything else (nan too) for one with inf or nan.
    rule : ScaleRule
        The constants; see `nvalchemi_hooks_loss_scaling.kernels.reference.advance` for the formula.

    Examples
    --------
    >>> rule = ScaleRule(growth_factor=2.0, backoff_factor=0.5, growth_interval=2, min_scale=1.0, max_scale=12.0)
    >>> scale, tracker = torch.tensor(8.0), torch.tensor(1, dtype=torch.int32)
    >>> advance(scale, tracker, torch.tensor(0.0), rule)
    >>> scale, tracker, bound(scale, rule)
    (tensor(16.), tensor(0, dtype=torch.int32), tensor(12.))
    """
    torch._amp_update_scale_(
        scale, growth_tracker, found_inf, rule.growth_factor, rule.backoff_factor, rule.growth_interval
    )


def bound(scale: Tensor, rule: ScaleRule, *, out: Tensor | None = None) -> Tensor:
    """Return the scale within its bounds, as a new tensor or in `out`, which may be `scale`."""
    return torch.clamp(scale, rule.min_scale, rule.max_scale, out=out)
