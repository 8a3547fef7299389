"""How the scale of the loss changes when a window closes: the rule in plain numbers, and the same on tensors.

Those of `device` are the ones that run, everywhere; `reference` is what they are tested against.
"""

from __future__ import annotations

from nvalchemi_hooks_loss_scaling.kernels.device import advance, bound
from nvalchemi_hooks_loss_scaling.kernels.reference import ScaleRule

__all__ = ["ScaleRule", "advance", "bound"]
