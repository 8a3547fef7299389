"""Which batches make a step, and that everything else happens once a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nvalchemi.hooks import TrainContext
from nvalchemi.training import GradientAccumulationHook, OptimizerConfig, TrainingStage, TrainingStrategy
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator

S = TrainingStage


def samples(batch):
    """How many samples a batch has."""
    return len(batch[0])


class Endless:
    """A loader that cannot say how long it is."""

    def __init__(self, batches):
        self._batches = batches

    def __iter__(self):
        return iter(self._batches)


def test_the_last_partial_window_of_an_epoch_is_stepped():
    """Six losses w*c, c = 1..6, four to a step, learning rate 1: w is -2.5 and then -8, without a length to look at."""
    weight = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(weight.weight)
    seen = []

    class Look(TrainingUpdateHook):
        def settled(self, ctx, *, skipped):
            seen.append(weight.weight.item())

    strategy = TrainingStrategy(
        models=weight,
        optimizer_configs=OptimizerConfig(optimizer_cls="SGD", optimizer_kwargs={"lr": 1.0}),
        loss_fn=lambda predictions, batch: predictions.sum(),
        num_epochs=1,
        hooks=[GradientAccumulationHook(steps=4), Look()],
        progress=False,
    )
    strategy.run(Endless([torch.tensor([[float(c)]]) for c in range(1, 7)]))
    assert seen == [-2.5, -8.0]


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("steps", [1, 3, 4])
def test_full_windows_are_the_mean_of_their_losses_bit_for_bit(
    make_strategy, make_batches, by_hand, weights_of, steps, optimizer, lazy
):
    """Each loss over `steps`, added up by backward: the plain loop gives the same bits."""
    batches = make_batches(*12 * [5])
    strategy = make_strategy(accumulate={"steps": steps}, optimizer=optimizer, lazy=lazy)
    strategy.run(batches)
    windows = [batches[at : at + steps] for at in range(0, 12, steps)]
    expected = by_hand([[(steps, batch) for batch in window] for window in windows], optimizer)
    assert torch.equal(weights_of(strategy), weights_of(expected))
    assert strategy.step_count == 12 // steps


@pytest.mark.parametrize("steps", [2, 5, 100])
def test_a_partial_window_is_normalised_by_what_it_holds(make_strategy, make_batches, by_hand, weights_of, steps):
    """Seven batches: the last window is the mean over the batches that are left, also if no window is ever full."""
    batches = make_batches(*7 * [4])
    strategy = make_strategy(accumulate={"steps": steps}, num_epochs=2)
    strategy.run(batches)
    windows = [batches[at : at + steps] for at in range(0, 7, steps)]
    expected = by_hand([[(len(window), batch) for batch in window] for window in 2 * windows])
    torch.testing.assert_close(weights_of(strategy), weights_of(expected), rtol=1e-6, atol=1e-7)


def test_the_norm_and_the_gradients_are_true_in_every_window(make_strategy, make_batches, plain, seen):
    """Before the step and after it, in full, partial and weighted windows: ctx.grad_norm is that of one big batch."""
    batches = make_batches(4, 4, 4, 1, 7)
    before, gradients = [], []

    def look(ctx):
        if ctx.window_complete:
            before.append(float(ctx.grad_norm))
            gradients.append(torch.cat([g.flatten() for g in ctx.gradients.values()]).norm().item())

    hook = plain(S.BEFORE_OPTIMIZER_STEP, look)
    strategy = make_strategy(hook, seen, accumulate={"steps": 2, "weight": samples}, lr=0.0)
    strategy.run(batches)
    expected = []
    for window in (batches[:2], batches[2:4], batches[4:]):
        x, y = (torch.cat(part) for part in zip(*window, strict=True))
        model = strategy.models["main"]
        grads = torch.autograd.grad((model(x) - y).square().mean(), list(model.parameters()))
        expected.append(torch.cat([g.flatten() for g in grads]).norm().item())
    assert before == pytest.approx(expected, rel=1e-5)
    assert gradients == pytest.approx(expected, rel=1e-5)
    assert seen.norms == pytest.approx(expected, rel=1e-5)


def test_schedulers_move_once_a_window(make_strategy, make_batches):
    """Eight batches, four to a step, halved at each step: 1 becomes 0.25."""
    config = OptimizerConfig(
        optimizer_cls="SGD",
        optimizer_kwargs={"lr": 1.0},
        scheduler_cls="StepLR",
        scheduler_kwargs={"step_size": 1, "gamma": 0.5},
    )
    strategy = make_strategy(optimizer_configs=config)
    strategy.run(make_batches(*8 * [2]))
    assert strategy.optimizers[0].param_groups[0]["lr"] == 0.25


def test_other_hooks_see_the_window(make_strategy, make_batches, plain, seen):
    """ctx.window_complete is the same for all; a hook with a frequency acts once for each count of steps."""
    fired = []
    strategy = make_strategy(seen, plain(S.AFTER_BATCH, lambda ctx: fired.append(ctx.batch_count), frequency=2))
    strategy.run(make_batches(*10 * [2]))
    assert seen.complete == [False, False, False, True] * 2 + [False, True]
    assert seen.skipped == [not complete for complete in seen.complete]
    assert fired == [1, 8]


def test_num_steps_counts_windows(make_strategy, make_batches):
    """A run of so many steps is so many windows, over as many passes as that takes."""
    strategy = make_strategy(num_epochs=None, num_steps=5)
    strategy.run(make_batches(*6 * [2]))
    assert (strategy.step_count, strategy.batch_count) == (5, 16)


def test_a_window_can_be_closed_by_hand(make_strategy, make_batches, by_hand, weights_of):
    """In a loop of one's own the last batch is said to be it; the next window begins after it."""
    batches = make_batches(*4 * [3])
    strategy = make_strategy(accumulate={"steps": 3})
    done = [strategy.train_batch(batch, is_last_batch=place in (1, 3)) for place, batch in enumerate(batches)]
    assert [ctx.step_skipped for ctx in done] == [True, False, True, False]
    expected = by_hand([[(2, batches[0]), (2, batches[1])], [(2, batches[2]), (2, batches[3])]])
    torch.testing.assert_close(weights_of(strategy), weights_of(expected), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stage", [S.BEFORE_FORWARD, S.AFTER_LOSS, S.AFTER_BACKWARD, S.BEFORE_OPTIMIZER_STEP])
@pytest.mark.parametrize("batch", [1, 3])
def test_an_error_ends_its_window_and_the_next_is_whole(make_strategy, make_batches, weights_of, plain, stage, batch):
    """After an exception in any batch of a window, a run goes on as a new one does: nothing half added is left."""
    batches = make_batches(*8 * [3])
    armed = [True]

    def fail(ctx):
        if armed[0] and ctx.batch_count == batch:
            raise OSError("the disk is gone")

    strategy = make_strategy(plain(stage, fail))
    with pytest.raises(OSError, match="the disk is gone"):
        strategy.run(batches)
    armed[0] = False
    strategy.run(batches)
    straight = make_strategy()
    straight.run(batches)
    assert torch.equal(weights_of(strategy), weights_of(straight))


@pytest.mark.parametrize("batch", [1, 3])
def test_an_error_inside_a_window_that_fsdp2_holds_is_final(make_strategy, make_batches, plain, batch):
    """Gradients that were not reduced yet lie where nobody can clear them, so the run is not gone on with."""
    armed = [True]

    def fail(ctx):
        if armed.pop():
            raise OSError("the disk is gone")

    strategy = make_strategy(plain(S.AFTER_LOSS, lambda ctx: ctx.batch_count == batch and armed and fail(ctx)))
    strategy.models["main"].set_requires_gradient_sync = lambda reduces: None  # as FSDP2's modules have it
    batches = make_batches(*8 * [3])
    with pytest.raises(OSError, match="the disk is gone"):
        strategy.run(batches)
    with pytest.raises(RuntimeError, match="half-way, and FSDP2 holds gradients of it"):
        strategy.run(batches)


@pytest.mark.parametrize("stage", [S.AFTER_BACKWARD, S.BEFORE_OPTIMIZER_STEP])
def test_an_error_takes_along_what_its_window_holds(make_strategy, make_batches, weights_of, plain, stage):
    """The last batch of a window fails once its weights are added up: the next window is not divided by them."""
    batches = make_batches(1, 3, 4, 2)

    def fail(ctx):
        if ctx.batch_count == 1:
            raise OSError("the disk is gone")

    weighted = {"steps": 2, "weight": samples}
    strategy, straight = make_strategy(plain(stage, fail), accumulate=weighted), make_strategy(accumulate=weighted)
    strategy.train_batch(batches[0])
    with pytest.raises(OSError, match="the disk is gone"):
        strategy.train_batch(batches[1])
    strategy.batch_count = 2
    for batch in batches[2:]:
        strategy.train_batch(batch)
        straight.train_batch(batch)
    assert strategy.step_count == 1
    torch.testing.assert_close(weights_of(strategy), weights_of(straight), rtol=1e-6, atol=1e-7)


def test_a_window_goes_on_in_the_next_run(make_strategy, make_batches, by_hand, weights_of):
    """Two batches by hand and a run over two others are one window."""
    batches = make_batches(*4 * [3])
    strategy = make_strategy()
    for batch in batches[:2]:
        strategy.train_batch(batch)
    strategy.run(batches[2:])
    assert strategy.step_count == 1
    assert torch.equal(weights_of(strategy), weights_of(by_hand([[(4, batch) for batch in batches]])))


def test_a_context_without_an_orchestrator_is_told_so():
    """A hook whose methods are called one by one in a partial window says what it needs."""
    hook = GradientAccumulationHook(steps=2)
    with TrainContext(is_last_batch=True) as ctx:
        hook.before_batch(ctx, will_skip=False)
        with pytest.raises(RuntimeError, match=r"compose the hook in a TrainingUpdateOrchestrator"):
            hook.transform_loss(ctx, torch.ones((), requires_grad=True))


def test_two_accumulators_exclude_each_other():
    """There is one window, so one hook says when it ends."""
    with pytest.raises(ValueError, match="family 'accumulation'"):
        TrainingUpdateOrchestrator(GradientAccumulationHook(steps=2), GradientAccumulationHook(steps=3))


def test_weights_in_double_precision_stay_exact(make_model, make_batches, weights_of):
    """A float64 model is divided in float64: a third of a window is exact to its last digits."""
    batches = [(x.double(), y.double()) for x, y in make_batches(3, 3)]
    strategy = TrainingStrategy(
        models=make_model().double(),
        optimizer_configs=OptimizerConfig(optimizer_cls="SGD", optimizer_kwargs={"lr": 1.0}),
        training_fn=lambda model, batch: model(batch[0]),
        loss_fn=lambda predictions, batch: (predictions - batch[1]).square().mean(),
        hooks=[GradientAccumulationHook(steps=3)],
        num_epochs=1,
        progress=False,
    )
    strategy.run(batches)
    model = make_model().double()
    loss = sum((model(x) - y).square().mean() for x, y in batches) / 2
    loss.backward()
    expected = torch.cat([(p - p.grad).detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(weights_of(strategy), expected, rtol=1e-14, atol=1e-15)
