"""Clipping passes the kit that every author of a hook is given."""

from __future__ import annotations

from nvalchemi.testing import HookConformance
from nvalchemi_hooks_grad_clip import GradientClipHook


class TestGradientClipHook(HookConformance):
    entry_point = "grad_clip"
    factory = GradientClipHook
    arguments = {"max_norm": 0.05}
    vetoes = True
    stateful = True
    reads_grad = False
    defers_veto = True
    decides_alike = True
    supports_cuda = True


class TestClippingByValue(TestGradientClipHook):
    arguments = {"max_norm": 0.5, "clip_value": 0.05}
    reads_grad = True


class TestClippingPerOptimizer(TestGradientClipHook):
    arguments = {"max_norm": 0.05, "per_optimizer": True}
    expected_failures = {
        "test_several_optimizers_train_as_one": "each optimizer is clipped by a norm of its own, not by the global one"
    }
