"""Micro-batches with a nan: the window is skipped, or goes on without them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nvalchemi.training import OptimizerConfig, TrainingStrategy
from nvalchemi_hooks_grad_accum import GradientAccumulationHook

BAD = torch.full((3, 1), torch.nan)


def poisoned(batches, *places):
    return [(x, BAD[: len(x)] if place in places else y) for place, (x, y) in enumerate(batches)]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_nan_vetoes_its_window_alone(make_strategy, make_batches, by_hand, weights_of, seen, place, lazy):
    """The window with the nan is skipped, wherever it is; the next one is stepped."""
    batches = make_batches(*8 * [3])
    strategy = make_strategy(seen, optimizer="AdamW", lazy=lazy)
    strategy.run(poisoned(batches, place))
    assert strategy.step_count == 1
    assert torch.equal(weights_of(strategy), weights_of(by_hand([[(4, batch) for batch in batches[4:]]], "AdamW")))


def test_the_veto_says_why(make_strategy, make_batches):
    """The outcome names the hook and the reason."""
    strategy = make_strategy()
    for place, batch in enumerate(poisoned(make_batches(*4 * [3]), 1)):
        ctx = strategy.train_batch(batch, is_last_batch=place == 3)
    assert [(veto.hook, veto.reason) for veto in ctx.outcome.vetoes] == [
        ("grad_accum", "a gradient of the window is not finite")
    ]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("places", [(0,), (1, 2), (3,), (0, 1, 2)])
def test_a_dropped_batch_is_as_if_it_were_not_there(make_strategy, make_batches, by_hand, weights_of, places, lazy):
    """What is left of the window is the mean of it: the first, the last, or all but one may be dropped."""
    batches = make_batches(*4 * [3])
    strategy = make_strategy(accumulate={"steps": 4, "on_nonfinite": "drop"}, lazy=lazy)
    strategy.run(poisoned(batches, *places))
    left = [batch for place, batch in enumerate(batches) if place not in places]
    torch.testing.assert_close(
        weights_of(strategy), weights_of(by_hand([[(len(left), batch) for batch in left]])), rtol=1e-6, atol=1e-7
    )
    assert strategy.hooks[0].dropped == len(places)


def test_what_is_left_is_weighted(make_strategy, make_batches, by_hand, weights_of):
    """With weights, those of the batches that were kept count."""
    batches = make_batches(1, 3, 2)
    strategy = make_strategy(accumulate={"steps": 3, "weight": samples, "on_nonfinite": "drop"})
    strategy.run(poisoned(batches, 1))
    expected = by_hand([[(3, batches[0]), (3 / 2, batches[2])]])
    torch.testing.assert_close(weights_of(strategy), weights_of(expected), rtol=1e-6, atol=1e-7)


def samples(batch):
    """How many samples a batch has."""
    return len(batch[0])


@pytest.mark.parametrize("lazy", [False, True])
def test_a_window_of_nothing_is_a_skipped_step(make_strategy, make_batches, by_hand, weights_of, lazy):
    """If every micro-batch was dropped no weight moves, by momentum or decay either; the next window is stepped."""
    batches = make_batches(*8 * [3])
    strategy = make_strategy(accumulate={"steps": 4, "on_nonfinite": "drop"}, optimizer="AdamW", lazy=lazy)
    strategy.run(poisoned(batches, 0, 1, 2, 3))
    assert strategy.step_count == 1
    assert torch.equal(weights_of(strategy), weights_of(by_hand([[(4, batch) for batch in batches[4:]]], "AdamW")))


def test_a_gradient_that_is_not_finite_vetoes_though_its_loss_is(make_strategy, make_batches):
    """What a finite loss hides is found in the gradients, and nothing steps on it."""
    strategy = make_strategy(
        accumulate={"steps": 2, "on_nonfinite": "drop"},
        loss_fn=lambda predictions, batch: (predictions * 0).sum().sqrt(),
    )
    for place, batch in enumerate(make_batches(3, 3)):
        ctx = strategy.train_batch(batch, is_last_batch=place == 1)
    assert ctx.step_skipped
    assert ctx.outcome.found_inf


def test_parameters_outside_the_graph_stay_without_a_gradient(make_batches):
    """Dropping gives no zeros to parameters that the batch did not use: no decay, no momentum moves them."""
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "unused": nn.Linear(3, 1)})
    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(optimizer_kwargs={"lr": 0.1, "weight_decay": 0.5}),
        training_fn=lambda model, batch: model["used"](batch[0]),
        loss_fn=lambda predictions, batch: (predictions - batch[1]).square().mean(),
        hooks=[GradientAccumulationHook(steps=2, on_nonfinite="drop")],
        num_epochs=1,
        progress=False,
    )
    before = model["unused"].weight.detach().clone()
    strategy.run(poisoned(make_batches(3, 3), 0))
    assert strategy.step_count == 1
    assert torch.equal(model["unused"].weight, before)


def test_dropping_leaves_no_hook_on_the_parameters(make_strategy, make_batches, by_hand, weights_of):
    """The batch after a dropped one is heard, in the same window and in the next."""
    batches = make_batches(*4 * [3])
    strategy = make_strategy(accumulate={"steps": 2, "on_nonfinite": "drop"})
    strategy.run(poisoned(batches, 0))
    expected = by_hand([[(1, batches[1])], [(2, batches[2]), (2, batches[3])]])
    torch.testing.assert_close(weights_of(strategy), weights_of(expected), rtol=1e-6, atol=1e-7)
