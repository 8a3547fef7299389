"""Loss scaling and mixed precision pass the kit that every author of a hook is given."""

from __future__ import annotations

from nvalchemi.testing import HookConformance
from nvalchemi_hooks_loss_scaling import LossScalingHook, MixedPrecisionHook


class TestLossScalingHook(HookConformance):
    entry_point = "loss_scaling"
    factory = LossScalingHook
    arguments = {"init_scale": 1024.0, "growth_interval": 2}
    stateful = True
    transforms_loss = True
    reads_grad = False
    supports_cuda = True


class TestMixedPrecisionHook(HookConformance):
    entry_point = "mixed_precision"
    factory = MixedPrecisionHook
    arguments = {"precision": "bf16"}
    stateful = True
    transforms_loss = True
    reads_grad = False
    supports_cuda = True


class TestMixedPrecisionInHalf(TestMixedPrecisionHook):
    arguments = {"precision": "fp16", "init_scale": 1024.0, "growth_interval": 2}
    low_precision = False  # weights stay in float32, and others are refused
