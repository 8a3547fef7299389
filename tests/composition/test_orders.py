"""Whatever the order in which plugins are given, the training is the same; and each adds just its own effect."""

from __future__ import annotations

import itertools

import pytest
import torch

from nvalchemi.training import EMAHook, GradientClipHook, GradScalerVetoHook, LossScalingHook

POISONED = (3,)


def _plugins(max_norm=0.3, scale=256.0):
    return {
        "ema": EMAHook(decay=0.9),
        "grad_clip": GradientClipHook(max_norm=max_norm),
        "loss_scaling": LossScalingHook(init_scale=scale, growth_interval=4),
        "scaler_veto": GradScalerVetoHook(),
    }


@pytest.fixture(params=["plain", "fused"])
def run(request, make_model, make_batches, train, weights):
    """Train 12 batches with some hooks; returns live weights, averaged weights (or None) and skipped steps."""

    def go(hooks, poisoned=POISONED):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=request.param == "fused")
        skipped = train(model, make_batches(12, poisoned=poisoned), hooks, optimizer)
        averages = [weights(hook.get_averaged_model().module) for hook in hooks if isinstance(hook, EMAHook)]
        return weights(model), averages[0] if averages else None, skipped

    return go


def test_all_24_orders_give_the_same_training(run):
    """All orders of giving the four plugins give the same training, bit for bit."""
    expected = run(list(_plugins().values()))
    assert expected[2] == [number in POISONED for number in range(12)]
    for order in itertools.permutations(_plugins()):
        plugins = _plugins()
        live, averaged, skipped = run([plugins[name] for name in order])
        assert torch.equal(live, expected[0]), order
        assert torch.equal(averaged, expected[1]), order
        assert skipped == expected[2], order


def _without(name, **options):
    return [hook for key, hook in _plugins(**options).items() if key != name]


def test_without_ema_the_live_weights_are_the_same(run):
    """Removing EMA removes the average and nothing else."""
    live, averaged, skipped = run(_without("ema"))
    expected = run(list(_plugins().values()))
    assert averaged is None
    assert torch.equal(live, expected[0])
    assert skipped == expected[2]


def test_without_clipping_steps_are_those_of_an_infinite_threshold(run):
    """Removing clipping is what an infinite threshold does, and not what the finite one did."""
    live, averaged, skipped = run(_without("grad_clip"))
    unclipped = run(list(_plugins(max_norm=float("inf")).values()))
    assert torch.equal(live, unclipped[0])
    assert torch.equal(averaged, unclipped[1])
    assert skipped == unclipped[2]
    assert not torch.equal(live, run(list(_plugins().values()))[0])


def test_without_loss_scaling_the_numbers_are_the_same(run):
    """Removing a loss scale that is a power of two changes no bit: scaling and unscaling are exact."""
    live, averaged, skipped = run(_without("loss_scaling", max_norm=float("inf")))
    expected = run(list(_plugins(max_norm=float("inf")).values()))
    assert torch.equal(live, expected[0])
    assert torch.equal(averaged, expected[1])
    assert skipped == expected[2]


def test_without_the_scaler_veto_nothing_changes_where_gradients_are_finite(run):
    """Removing the veto on inf changes nothing as long as there is none."""
    live, averaged, _ = run(_without("scaler_veto"), poisoned=())
    expected = run(list(_plugins().values()), poisoned=())
    assert torch.equal(live, expected[0])
    assert torch.equal(averaged, expected[1])


def test_only_a_veto_holds_back_a_step_on_nan_without_scaler_and_clipping(run):
    """With EMA alone a poisoned batch is stepped, as in plain torch; the scaler veto is what holds it back."""
    alone = run([EMAHook(decay=0.9)])
    assert not any(alone[2])
    assert not torch.isfinite(alone[0]).all()
    guarded = run([EMAHook(decay=0.9), GradScalerVetoHook()])
    assert guarded[2] == [number in POISONED for number in range(12)]
    assert torch.isfinite(guarded[0]).all()
