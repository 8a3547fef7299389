"""Whether the gradients of the batch before are forgotten or kept, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from nvalchemi.errors import HookContractError

if TYPE_CHECKING:
    from nvalchemi.training.hooks.window import UpdateWindow

__all__ = ["forget_gradients", "refuse_mixed_scales"]


def forget_gradients(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Set gradients to None, as ``zero_grad`` does; one that does more is called."""
    for optimizer in optimizers:
        if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad or "zero_grad" in vars(optimizer):
            optimizer.zero_grad(set_to_none=True)
            continue
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def refuse_mixed_scales(window: UpdateWindow | None) -> None:
    """Refuse to keep gradients of a window in which they were unscaled."""
    if window is not None and window.unscaled:
        raise HookContractError(
            "Gradients were to be kept at BEFORE_BATCH although their loss scale is divided out already, so the next "
            "backward pass would add scaled gradients to true ones; a hook that accumulates sets "
            "ctx.window_complete = False for as long as it wants to keep gradients."
        )
