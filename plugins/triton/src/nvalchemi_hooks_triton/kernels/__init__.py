"""The arithmetic of the one-pass update: Triton programs, how they are launched, and the equations they follow.

============= =========================================================================================
module        what
============= =========================================================================================
`reference`   the equations, for comparison
`device`      the programs; imports triton, and is imported only when it is needed
`loading`     when that is, and on which devices they can run
`tables`      addresses and pieces, kept on the device
`onepass`     from lists of tensors to launches
============= =========================================================================================
"""

from __future__ import annotations

from nvalchemi_hooks_triton.kernels.loading import obstacle, programs
from nvalchemi_hooks_triton.kernels.onepass import KINDS, Batch, Rule, can_launch, update_
from nvalchemi_hooks_triton.kernels.tables import Tables, addresses

__all__ = ["KINDS", "Batch", "Rule", "Tables", "addresses", "can_launch", "obstacle", "programs", "update_"]
