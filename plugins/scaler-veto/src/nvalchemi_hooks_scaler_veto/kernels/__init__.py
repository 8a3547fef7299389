"""Which gradient is to blame; whether any is, the update window knows already.

That of `foreach` is the one that runs, on every device; that of `reference` is what it is tested against.
"""

from __future__ import annotations

from nvalchemi_hooks_scaler_veto.kernels.foreach import first_nonfinite

__all__ = ["first_nonfinite"]
