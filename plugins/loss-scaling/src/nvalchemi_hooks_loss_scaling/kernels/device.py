"""The rule of dynamic loss scaling on tensors: nothing is read by the host."""

from __future__ import annotations

import torch
from torch import Tensor

from nvalchemi_hooks_loss_scaling.kernels.reference import ScaleRule

__all__ = ["advance"]


def advance(scale: Tensor, growth_tracker: Tensor, found_inf: Tensor, rule: ScaleRule) -> Tensor:
    """Return the scale after one window, as a new tensor, and count the window in `growth_tracker`, in place.

    Three launches on scalars. `scale` itself is left alone: what was derived from it in the window stays right. The
    middle launch is the operator with which ``torch.amp.GradScaler`` updates, so both agree bit for bit.

    Parameters
    ----------
    scale : torch.Tensor
        0-dim float32: the scale of the window that ends.
    growth_tracker : torch.Tensor
        0-dim int32 on the same device: good windows in a row. Changed in place.
    found_inf : torch.Tensor
        0-dim float32 on the same device: 0 for a good window, anything else (nan too) for one with inf or nan.
    rule : ScaleRule
        The constants; see `nvalchemi_hooks_loss_scaling.kernels.reference.advance` for the formula.

    Returns
    -------
    torch.Tensor
        0-dim float32: the scale of the next window.

    Examples
    --------
    >>> rule = ScaleRule(growth_factor=2.0, backoff_factor=0.5, growth_interval=2, min_scale=1.0, max_scale=16.0)
    >>> scale, tracker = torch.tensor(8.0), torch.tensor(1, dtype=torch.int32)
    >>> advance(scale, tracker, torch.tensor(0.0), rule), tracker
    (tensor(16.), tensor(0, dtype=torch.int32))
    """
    following = scale.clone()
    torch._amp_update_scale_(
        following, growth_tracker, found_inf, rule.growth_factor, rule.backoff_factor, rule.growth_interval
    )
    return following.clamp_(rule.min_scale, rule.max_scale)
