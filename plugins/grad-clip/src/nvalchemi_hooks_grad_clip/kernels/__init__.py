"""The arithmetic of clipping: functions on tensors that know no hook.

Those of `foreach` are the ones that run, on every device; those of `reference` are what they are tested against.
"""

from __future__ import annotations

from nvalchemi_hooks_grad_clip.kernels.foreach import (
    clamp_,
    clip_divisor,
    first_nonfinite,
    largest_divisor,
    largest_usable,
)

__all__ = ["clamp_", "clip_divisor", "first_nonfinite", "largest_divisor", "largest_usable"]
