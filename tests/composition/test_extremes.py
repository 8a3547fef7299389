"""At the ends of the number range a step is right, or it is vetoed; it is never a silent zero."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.hooks import TrainContext
from nvalchemi.training import GradientClipHook, GradScalerVetoHook, LossScalingHook, TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("scale", "gradient", "clip"),
    [
        (2.0**64, 1e18, {"max_norm": 1e-3}),
        (65536.0, 1e30, {"max_norm": 1e-5, "norm_type": float("inf")}),
        (65536.0, 1e28, {"max_norm": 1e-7, "norm_type": 1.0}),
        (2.0**32, 1e16, {"max_norm": 1e-13}),
        (65536.0, 1.0, {"max_norm": 1e-3}),
    ],
)
def test_no_step_is_a_silent_zero(scale, gradient, clip, fused):
    """Whatever scale, gradient and threshold: the weight moves by the clipped gradient, or the step is vetoed."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32))
    hooks = TrainingUpdateOrchestrator(LossScalingHook(scale=scale), GradientClipHook(**clip))
    with TrainContext(optimizers=[torch.optim.SGD([weight], lr=1.0, fused=fused)]) as ctx:
        hooks(ctx, TrainingStage.BEFORE_BATCH)
        ctx.loss = (weight * gradient).sum()
        hooks(ctx, TrainingStage.DO_BACKWARD)
        hooks(ctx, TrainingStage.DO_OPTIMIZER_STEP)
        hooks(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
    if ctx.step_skipped:
        assert ctx.outcome.vetoes
        assert ctx.outcome.found_inf
        assert weight.item() == 0.0
    else:
        assert weight.item() == pytest.approx(-clip["max_norm"], rel=1e-2)


class Sanitises(TrainingUpdateHook):
    """Makes gradients finite, after somebody has vetoed them and before they are clipped."""

    priority = 27
    defers_veto = True

    def before_optimizer_step(self, ctx, *, will_skip):
        for gradient in ctx.window.tensors():
            gradient.nan_to_num_(posinf=1.0)
        return True


@pytest.mark.parametrize("lazy", [False, True])
def test_a_veto_on_what_backward_left_is_not_mended_afterwards(lazy):
    """An inf that was vetoed vetoes the step, though a later hook makes it finite and its norm is clipped."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    hooks = TrainingUpdateOrchestrator(GradScalerVetoHook(), Sanitises(), GradientClipHook(), lazy=lazy)
    for gradient, expected in ((0.5, 0.5), (float("inf"), 0.5), (0.25, 0.25)):
        with TrainContext(optimizers=[optimizer]) as ctx:
            hooks(ctx, TrainingStage.BEFORE_BATCH)
            ctx.loss = (weight * gradient).sum()
            hooks(ctx, TrainingStage.DO_BACKWARD)
            hooks(ctx, TrainingStage.DO_OPTIMIZER_STEP)
            hooks(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
        assert weight.item() == expected
    assert hooks.last_outcome.resolution.startswith("lazily") is lazy
