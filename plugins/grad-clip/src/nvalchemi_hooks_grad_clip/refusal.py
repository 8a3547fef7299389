"""What is said when gradients are refused: the norm, the first parameter to look at, the remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvalchemi_hooks_grad_clip import kernels

if TYPE_CHECKING:
    from nvalchemi.hooks import TrainContext

__all__ = ["culprit", "refusal"]


def culprit(ctx: TrainContext) -> str:
    """Return which gradient is not finite, the first in the order of the models; for a person to read."""
    named = ctx.gradients
    place = kernels.first_nonfinite(list(named.values()))
    if place is not None:
        return f"the first gradient with an inf or a nan is that of {list(named)[place]!r}"
    if ctx.window is not None and kernels.first_nonfinite(ctx.window.tensors()) is not None:
        return "an inf or a nan is in the gradient of a parameter that no model of ctx.models holds"
    return "every single gradient is finite, but their norm overflows"


def refusal(ctx: TrainContext, norm: float, norm_type: float) -> str:
    """Return the message of the error that ends a run on a norm that is not finite."""
    return (
        f"GradientClipHook: the norm of the gradients is {norm} (norm_type={norm_type:g}): {culprit(ctx)}. Nothing was "
        "stepped. Look at the loss and the data of this batch, or lower the learning rate; under a dynamic loss scale, "
        "or to leave such steps out and go on, use error_if_nonfinite=False."
    )
