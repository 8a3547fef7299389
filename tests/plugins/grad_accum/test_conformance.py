"""Accumulation passes the kit that every author of a hook is given."""

from __future__ import annotations

from nvalchemi.testing import HookConformance
from nvalchemi_hooks_grad_accum import GradientAccumulationHook


class TestGradientAccumulationHook(HookConformance):
    entry_point = "grad_accum"
    factory = GradientAccumulationHook
    arguments = {"steps": 2}
    vetoes = True
    stateful = True
    transforms_loss = True
    reads_grad = False
    defers_veto = True
    decides_alike = True
    supports_cuda = True
