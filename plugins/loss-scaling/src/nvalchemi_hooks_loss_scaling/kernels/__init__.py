"""How the scale of the loss changes when a window closes: the rule in plain numbers, and the same on tensors.

Where the host knows how windows end, `advance_numbers` moves the scale there and costs the device nothing; where it
does not, `advance` and `bound` do on the device. Both are one rule, to the bit.
"""

from __future__ import annotations

from nvalchemi_hooks_loss_scaling.kernels.device import advance, bound
from nvalchemi_hooks_loss_scaling.kernels.reference import ScaleRule
from nvalchemi_hooks_loss_scaling.kernels.reference import advance as advance_numbers

__all__ = ["ScaleRule", "advance", "advance_numbers", "bound"]
