"""The average passes the kit that every author of a hook is given."""

from __future__ import annotations

from nvalchemi.testing import HookConformance
from nvalchemi_hooks_ema import EMAHook


class TestEMAHook(HookConformance):
    entry_point = "ema"
    factory = EMAHook
    arguments = {"decay": 0.9, "update_every": 2}
    stateful = True
    defers_veto = True
    reads_grad = False
    supports_cuda = True
