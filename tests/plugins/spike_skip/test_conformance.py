"""The hook passes the kit that every author of a hook is given."""

from __future__ import annotations

from nvalchemi.testing import HookConformance
from nvalchemi_hooks_spike_skip import SpikeSkipHook


class TestSpikeSkipHook(HookConformance):
    entry_point = "spike_skip"
    factory = SpikeSkipHook
    arguments = {"warmup": 1, "min_ratio": 8.0}
    vetoes = True
    stateful = True
    reads_grad = False
    transforms_loss = True
    decides_alike = True
    defers_veto = True
    supports_cuda = True

    def vetoed_batch(self, batch):
        """Return a batch whose targets are far out, and finite."""
        x, y = batch
        return x, y + 1e3


class TestWatchingTheLoss(TestSpikeSkipHook):
    arguments = {"watch": "loss", "warmup": 1, "min_ratio": 8.0, "signed_loss": True}


class TestWatchingTheNorm(TestSpikeSkipHook):
    arguments = {"watch": "grad_norm", "warmup": 1, "min_ratio": 8.0}
