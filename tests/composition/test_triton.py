"""The one-pass executor under all other plugins, its programs in Triton's interpreter: another way, the same run."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.training import EMAHook, GradientClipHook, GradScalerVetoHook, LossScalingHook, TritonHook

POISONED = (4, 5, 9)


@pytest.fixture
def trained(monkeypatch, make_model, make_batches, train):
    """Train with all plugins and these; returns weights, averages, and what was skipped."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    def run(*more):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, fused=True)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        ema = EMAHook(decay=0.9)
        hooks = [LossScalingHook(init_scale=256.0), GradScalerVetoHook(), GradientClipHook(max_norm=0.25), ema, *more]
        skipped = train(model, make_batches(14, poisoned=POISONED), hooks, optimizer, scheduler)
        weights = [weight.detach() for weight in model.parameters()]
        averages = [weight.detach() for weight in ema.get_averaged_model().parameters()]
        return weights, averages, skipped, hooks[0].state_dict(), scheduler.state_dict()

    return run


def test_all_plugins_give_the_same_run(trained):
    """Scale, veto, clipping, schedule and average are those of a run without it, its weights to rounding."""
    (weights, averages, *mine), (expected, expected_averages, *theirs) = trained(TritonHook()), trained()
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(averages, expected_averages, rtol=1e-5, atol=1e-6)
    assert mine == theirs
    assert mine[0] == [number in POISONED for number in range(14)]


def test_it_is_the_executor_that_steps(trained, monkeypatch):
    """All steps are carried out by it but the first, through which a scheduler sees that there was one."""
    hook, taken = TritonHook(), []
    executor = hook.update_executor()
    execute = executor.execute
    monkeypatch.setattr(executor, "execute", lambda plan: taken.append(execute(plan)) or taken[-1])
    trained(hook)
    assert taken == [True] * (14 - len(POISONED) - 1)
