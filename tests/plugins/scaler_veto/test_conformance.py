"""The veto passes the kit that every author of a hook is given."""

from __future__ import annotations

from nvalchemi.testing import HookConformance
from nvalchemi_hooks_scaler_veto import GradScalerVetoHook


class TestGradScalerVetoHook(HookConformance):
    entry_point = "scaler_veto"
    factory = GradScalerVetoHook
    vetoes = True
    stateful = True
    reads_grad = False
    defers_veto = True
    decides_alike = True
    supports_cuda = True
