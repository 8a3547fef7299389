"""Strategies that name their hooks, with all official plugins installed."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch

from nvalchemi.hooks import list_hooks
from nvalchemi.training import (
    EMAHook,
    GradientClipHook,
    GradScalerVetoHook,
    MixedPrecisionHook,
    OptimizerConfig,
    TrainingStage,
    TrainingStrategy,
    Validation,
)


@pytest.fixture
def make_strategy(make_model):
    """A strategy over the small model, trained for some steps."""

    def make(**options):
        options = {"num_steps": 8, **options}
        return TrainingStrategy(
            models=make_model(),
            optimizer_configs=OptimizerConfig(optimizer_kwargs={"lr": 0.01}),
            training_fn=lambda model, batch: model(batch[0]),
            loss_fn=lambda predictions, batch: (predictions - batch[1]).square().mean(),
            **options,
        )

    return make


def test_every_official_name_is_listed_with_its_distribution():
    """Listing names the official hooks, each available and from its own distribution."""
    listed = {hook.name: hook for hook in list_hooks()}
    assert {name: hook.distribution for name, hook in listed.items()} == {
        "checkpoint": "nvalchemi-hooks-checkpoint",
        "ddp": "nvalchemi-hooks-distributed",
        "ema": "nvalchemi-hooks-ema",
        "fsdp": "nvalchemi-hooks-distributed",
        "grad_accum": "nvalchemi-hooks-grad-accum",
        "grad_clip": "nvalchemi-hooks-grad-clip",
        "loss_scaling": "nvalchemi-hooks-loss-scaling",
        "mixed_precision": "nvalchemi-hooks-loss-scaling",
        "scaler_veto": "nvalchemi-hooks-scaler-veto",
        "triton": "nvalchemi-hooks-triton",
    }
    assert {hook.state.value for hook in listed.values()} == {"available"}


def test_a_strategy_activates_what_it_names(make_strategy, make_batches):
    """A strategy finds hooks by name, gives them their arguments, and orders them by priority."""
    strategy = make_strategy(
        hooks=["ema", {"grad_clip": {"max_norm": 0.25}}, "scaler_veto", {"mixed_precision": {"precision": "bf16"}}]
    )
    hooks = list(strategy.orchestrator.iter_hooks())
    assert [type(hook) for hook in hooks] == [MixedPrecisionHook, GradScalerVetoHook, GradientClipHook, EMAHook]
    assert hooks[2].max_norm == 0.25
    strategy.run(make_batches(4))
    assert strategy.step_count == 8
    assert hooks[3].num_updates == 8


def test_auto_activates_ema_clipping_and_the_veto(make_strategy, caplog):
    """hooks="auto" activates the hooks that can do without arguments, and logs where each comes from."""
    with caplog.at_level(logging.INFO, "nvalchemi"):
        strategy = make_strategy(hooks="auto")
    assert [hook.name for hook in strategy.orchestrator.iter_hooks()] == ["scaler_veto", "grad_clip", "ema"]
    for name in ("ema", "grad-clip", "scaler-veto"):
        assert f"nvalchemi-hooks-{name} " in caplog.text


def test_two_averages_live_side_by_side_under_their_labels(make_strategy, make_batches):
    """A mapping labels hooks, so that two of one class can be told apart; each keeps its own average."""
    strategy = make_strategy(hooks={"fast": {"ema": {"decay": 0.5}}, "slow": {"ema": {"decay": 0.99}}})
    strategy.run(make_batches(4))
    fast, slow = strategy.orchestrator.iter_hooks()
    assert (fast.state_key, slow.state_key) == ("fast", "slow")
    assert set(strategy.orchestrator.state_dict()) == {"fast", "slow"}
    first = [next(hook.get_averaged_model().module.parameters()) for hook in (fast, slow)]
    assert not torch.equal(*first)


def test_validation_evaluates_the_averaged_weights_and_swaps_nothing(make_strategy, make_batches, weights):
    """Validation with averaged weights gives the loss of the averaged module, and leaves the live one as it was."""
    held_out = make_batches(2)
    strategy = make_strategy(hooks=["ema"], validation=Validation(loader=held_out))
    assert strategy.validate().weights == "live"  # before the first update
    strategy.run(make_batches(4))
    before = weights(strategy.models["main"])
    result = strategy.validate()
    averaged = next(strategy.orchestrator.iter_hooks()).get_averaged_model().module
    with torch.no_grad():
        expected = sum(float((averaged(x) - y).square().mean()) for x, y in held_out) / 2
    assert result.weights == "averaged"
    assert result["loss"] == pytest.approx(expected, rel=1e-6)
    assert torch.equal(before, weights(strategy.models["main"]))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [TrainingStage.AFTER_FORWARD, TrainingStage.AFTER_BACKWARD])
def test_interrupting_a_batch_closes_autocast(make_strategy, make_batches, precision, stage):
    """After a Ctrl-C in the middle of a batch autocast is closed, and the next run goes on to the goal."""

    class Interrupt:
        frequency = 1

        def __init__(self):
            self.stage = stage
            self.armed = True

        def __call__(self, ctx, stage):
            if ctx.step_count == 2 and self.armed:
                self.armed = False
                raise KeyboardInterrupt

    strategy = make_strategy(hooks=[{"mixed_precision": {"precision": precision}}, "ema", "scaler_veto", Interrupt()])
    with pytest.raises(KeyboardInterrupt):
        strategy.run(make_batches(4))
    assert not torch.is_autocast_enabled("cpu")
    assert strategy.step_count == 2
    strategy.run(make_batches(4))
    assert strategy.step_count == 8
    assert not torch.is_autocast_enabled("cpu")


def test_validation_runs_in_the_precision_of_training(make_strategy, make_batches):
    """Autocast also spans validation, and is closed after it."""
    seen = []
    strategy = make_strategy(hooks=[{"mixed_precision": {"precision": "bf16"}}])
    strategy.training_fn = lambda model, batch: seen.append(model(batch[0]).dtype) or model(batch[0])
    strategy.validate(make_batches(1))
    assert seen == [torch.bfloat16]
    assert not torch.is_autocast_enabled("cpu")


def test_schedulers_and_averages_wait_for_real_steps(make_strategy, make_batches):
    """A poisoned batch moves neither scheduler, nor average, nor step counter; the batch counter moves."""
    strategy = make_strategy(
        num_epochs=1,
        num_steps=None,
        hooks=["ema", "grad_clip", "scaler_veto", "loss_scaling"],
    )
    strategy.optimizer_configs = {
        "main": (
            OptimizerConfig(
                optimizer_cls="SGD",
                scheduler_cls="StepLR",
                scheduler_kwargs={"step_size": 1, "gamma": 0.5},
                optimizer_kwargs={"lr": 1e-3},
            ),
        )
    }
    strategy.run(make_batches(6, poisoned=(0, 3)))
    *_, ema = strategy.orchestrator.iter_hooks()
    assert (strategy.step_count, strategy.batch_count) == (4, 6)
    assert ema.num_updates == 4
    assert strategy.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3 * 0.5**4)


def test_a_strategy_trains_the_same_whatever_the_order_of_its_hooks(make_strategy, make_batches, weights):
    """All 24 orders in which a strategy can name the four plugins give the same weights, bit for bit."""
    names = ["ema", "grad_clip", "loss_scaling", "scaler_veto"]
    results = []
    for order in itertools.permutations(names):
        strategy = make_strategy(num_steps=3, hooks=list(order))
        strategy.run(make_batches(4, poisoned=(1,)))
        averaged = strategy.hooks[order.index("ema")].get_averaged_model().module
        results.append(torch.cat([weights(strategy.models["main"]), weights(averaged)]))
    assert len(results) == 24
    assert all(torch.equal(results[0], other) for other in results)
