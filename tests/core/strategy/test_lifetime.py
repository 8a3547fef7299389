"""How a run begins and ends: hooks entered and left, set up once or afresh, finished once."""

from __future__ import annotations

import pytest
from torch import nn

from nvalchemi.training import OptimizerConfig, TrainingStage

S = TrainingStage


def test_hooks_are_entered_in_order_and_left_in_reverse(make_strategy, managed, batches):
    """Hooks are entered before BEFORE_TRAINING in order and left after AFTER_TRAINING in reverse, in every run."""
    log = []
    strategy = make_strategy(managed(log, "a"), managed(log, "b"))
    strategy.run(batches)
    assert log == ["enter a", "enter b", "exit b None", "exit a None"]
    strategy.run(batches)
    assert log[4:] == log[:4]


def test_a_hook_that_fails_to_be_entered_leaves_nothing_open(make_strategy, managed, batches):
    """When entering a hook fails, those entered before are left, and the modes are as they were."""

    class Broken(managed):
        def __enter__(self):
            raise OSError("no such file")

    log, model = [], nn.Linear(2, 1).eval()
    strategy = make_strategy(managed(log, "a"), Broken(log, "broken"), managed(log, "c"), models=model)
    with pytest.raises(OSError, match="no such file"):
        strategy.run(batches)
    assert log == ["enter a", "exit a OSError"]
    assert not model.training
    assert strategy.batch_count == 0


def test_a_run_interrupted_after_its_last_step_is_finished_not_begun_anew(make_strategy, plain, batches):
    """A run that was interrupted when its goal was reached has nothing left to train."""
    armed = [True]

    def interrupt(ctx, stage):
        if armed and ctx.step_count == 3:
            armed.clear()
            raise KeyboardInterrupt

    strategy = make_strategy(plain(interrupt, S.AFTER_BATCH), num_steps=3)
    with pytest.raises(KeyboardInterrupt):
        strategy.run(batches)
    strategy.run(batches)
    assert strategy.step_count == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_setup_that_was_interrupted_starts_afresh(make_strategy, plain, batches, error):
    """When SETUP is interrupted models are as they were, and the next attempt sets up once, wrapping once."""
    armed = [True]

    def wrap(ctx, stage):
        ctx.models["main"] = nn.Sequential(ctx.models["main"])

    def interrupt(ctx, stage):
        if armed:
            armed.clear()
            raise error("stop")

    model = nn.Linear(2, 1)
    strategy = make_strategy(plain(wrap, S.SETUP), plain(interrupt, S.SETUP), models=model)
    with pytest.raises(error):
        strategy.run(batches)
    assert strategy.models["main"] is model
    assert strategy.optimizers == []
    strategy.run(batches)
    assert strategy.models["main"][0] is model
    assert len(strategy.optimizers) == 1


def test_optimizers_that_could_not_be_built_leave_none_behind(make_strategy, batches):
    """When the second of two optimizers cannot be built, the first is not kept: a retry builds each once."""
    head = nn.Linear(2, 1)
    for parameter in head.parameters():
        parameter.requires_grad_(False)
    strategy = make_strategy(
        models={"main": nn.Linear(2, 1), "head": head},
        optimizer_configs={"main": OptimizerConfig(scheduler_cls="ConstantLR"), "head": OptimizerConfig()},
        training_fn=lambda models, batch: models["main"](batch[0]) + models["head"](batch[0]),
    )
    with pytest.raises(ValueError, match=r"Model 'head' \(Linear\) has no parameter to optimize; leave it out"):
        strategy.run(batches)
    assert (strategy.optimizers, strategy.lr_schedulers) == ([], [])
    head.requires_grad_(True)
    strategy.run(batches)
    assert (len(strategy.optimizers), len(strategy.lr_schedulers)) == (2, 1)
