"""The arithmetic of the rule: when a number stands out from those before it.

That of `ordered` is the one that runs; that of `reference` is what it is tested against. Both work on the host, on
numbers that it knows: the limit of a step follows from the steps before it, which the host has been told of by then,
also in a lazy update. What the device does is compare a number with a limit.
"""

from __future__ import annotations

from nvalchemi_hooks_spike_skip.kernels.ordered import History

__all__ = ["History"]
