"""The vetoes of a window as flags on the device, for steps that do not wait for the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nvalchemi.training.hooks.decision import fold_flags

if TYPE_CHECKING:
    from nvalchemi.training.hooks.decision import Decision
    from nvalchemi.training.hooks.gradients import OptimizerGradients
    from nvalchemi.training.hooks.window_gradients import WindowGradients

__all__ = ["fold"]


def fold(decision: Decision, gradients: WindowGradients) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return all vetoes as one flag, and the flag of each optimizer that has gradients, in which it may differ.

    A flag is float32, 0-dim, exactly 0 or 1; None where nothing can veto.
    """
    deferred, chosen, bounded = decision.deferred, gradients.chosen(), _bounded(decision, gradients)
    spared = all(any(one is other for other in bounded) for one in chosen)
    counted = [one for one in deferred if not (one.nonfinite and spared)]
    products = [one.pending_product() for one in chosen if one.has_product and not gradients.fits(one)]
    common = fold_flags(counted, products, gradients.device) if counted or products else None
    if gradients.scaler is None or spared or any(one.nonfinite for one in deferred):
        return common, [common] * len(chosen)
    own = [fold_flags([], [one.peak()], gradients.device) for one in chosen]
    return common, list(own) if common is None else [torch.maximum(common, flag) for flag in own]


def _bounded(decision: Decision, gradients: WindowGradients) -> list[OptimizerGradients]:
    """Return the gradients that are finite if no deferred veto on a norm of theirs counts."""
    if gradients.changed:  # what a hook has made of them says nothing of what the backward pass left
        return []
    numbers = [number for one in decision.deferred if not one.nonfinite for number in one.numbers]
    return [one for norm, chosen in gradients.measured if any(norm is number for number in numbers) for one in chosen]
