"""What random sequences found, each as the shortest sequence that shows it."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.testing import tiny_batches, tiny_strategy
from nvalchemi.training.hooks import TrainingUpdateHook


class TwoToAWindow(TrainingUpdateHook):
    """Accumulates over two batches, by the public field alone."""

    reads_grad = False

    def before_batch(self, ctx, *, will_skip):
        """Say that the window goes on."""
        ctx.window_complete = ctx.batch_count % 2 == 1
        return True


class Settled(TrainingUpdateHook):
    """Counts what it is told."""

    reads_grad = False
    defers_veto = True
    priority = 30

    def __init__(self):
        self.count = 0

    def before_optimizer_step(self, ctx, *, will_skip):
        """Leave a decision on the device, so that a lazy step is pending."""
        ctx.defer_veto(torch.zeros(()), "never")
        return True

    def settled(self, ctx, *, skipped):
        """Count."""
        self.count += not skipped


class Raises(TrainingUpdateHook):
    """Raises after the first step."""

    reads_grad = False
    defers_veto = True

    def after_optimizer_step(self, ctx, *, skipped):
        """Raise, once."""
        if ctx.batch_count == 0:
            raise ArithmeticError


@pytest.mark.parametrize("again", [False, True], ids=["new strategy", "same strategy"])
def test_a_window_that_was_open_goes_on_after_a_load(again):
    """A window of which one batch is behind when the run is saved is stepped with both, as if it went straight on."""
    first, second = tiny_batches(2)
    straight, stopped = tiny_strategy(TwoToAWindow()), tiny_strategy(TwoToAWindow())
    for strategy in (straight, stopped):
        strategy.train_batch(first)
    state = stopped.state_dict()
    resumed = tiny_strategy(TwoToAWindow())
    if again:
        resumed = stopped
        resumed.train_batch(second)  # and is now in another place
    resumed.load_state_dict(state)
    for strategy in (straight, resumed):
        assert not strategy.train_batch(second).step_skipped
    weights = zip(straight.models["main"].parameters(), resumed.models["main"].parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in weights)


def test_a_window_that_was_closed_is_not_reopened_by_a_load():
    """Gradients of a window that is under way are forgotten by a load of a state without one."""
    first, second = tiny_batches(2)
    straight, strategy = tiny_strategy(TwoToAWindow()), tiny_strategy(TwoToAWindow())
    for one in (straight, strategy):
        one.train_batch(first)
        one.train_batch(second)
    state = strategy.state_dict()
    strategy.train_batch(second)
    strategy.load_state_dict(state)
    assert strategy.orchestrator.last_outcome is None
    for one in (straight, strategy):
        one.train_batch(first)
        one.train_batch(second)
    weights = zip(straight.models["main"].parameters(), strategy.models["main"].parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in weights)


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_a_step_is_settled_whatever_a_hook_says_to_it(lazy):
    """A hook that raises at AFTER_OPTIMIZER_STEP takes no count away from the others: they are told of the step."""
    settled = Settled()
    strategy = tiny_strategy(settled, Raises(), lazy=lazy)
    batch = tiny_batches(1)[0]
    with pytest.raises(ArithmeticError):
        strategy.train_batch(batch)
    strategy.train_batch(batch)
    assert strategy.step_count == settled.count == 2
