"""How the scale of the loss changes when a window closes: the rule in plain numbers, and the same on tensors.

`advance` is the one that runs, on every device; `reference` is what it is tested against.
"""

from __future__ import annotations

from nvalchemi_hooks_loss_scaling.kernels.device import advance
from nvalchemi_hooks_loss_scaling.kernels.reference import ScaleRule

__all__ = ["ScaleRule", "advance"]
