"""The vetoes of a window as flags on the device, for steps that do not wait for the host."""

from __future__ import annotations

from itertools import filterfalse, repeat
from operator import attrgetter, is_
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nvalchemi.training.hooks.decision import fold_flags

if TYPE_CHECKING:
    from nvalchemi.training.hooks.decision import Decision
    from nvalchemi.training.hooks.gradients import OptimizerGradients
    from nvalchemi.training.hooks.window_gradients import WindowGradients

__all__ = ["fold"]

_nonfinite = attrgetter("nonfinite")


def fold(decision: Decision, gradients: WindowGradients) -> tuple[Tensor | None, list[Tensor | None]]:
    """Return all vetoes as one flag, and the flag of each optimizer that has gradients, in which it may differ.

    A flag is float32, 0-dim, exactly 0 or 1; None where nothing can veto.
    """
    deferred, chosen, bounded = decision.deferred, gradients.chosen(), _bounded(decision, gradients)
    spared = bounded.issuperset(chosen)
    counted = list(filterfalse(_nonfinite, deferred)) if spared else deferred
    products = []
    for one in chosen:
        if one.has_product and not gradients.fits(one):
            products.append(one.pending_product())
    common = fold_flags(counted, products, gradients.device) if counted or products else None
    if gradients.scaler is None or spared or any(map(_nonfinite, deferred)):
        return common, [common] * len(chosen)
    own = [fold_flags([], [one.peak()], gradients.device) for one in chosen]
    return common, list(own) if common is None else [torch.maximum(common, flag) for flag in own]


def _bounded(decision: Decision, gradients: WindowGradients) -> set[OptimizerGradients]:
    """Return the gradients that are finite if no deferred veto on a norm of theirs counts."""
    if gradients.changed:  # what a hook has made of them says nothing of what the backward pass left
        return set()
    numbers: list[Tensor] = []
    for one in filterfalse(_nonfinite, decision.deferred):
        numbers += one.numbers
    bounded: set[OptimizerGradients] = set()
    for norm, chosen in gradients.measured:
        if any(map(is_, numbers, repeat(norm))):
            bounded.update(chosen)
    return bounded
