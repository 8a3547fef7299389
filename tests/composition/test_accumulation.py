"""Accumulation beside the other hooks: each of them acts once a window, on its true gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nvalchemi.training import (
    EMAHook,
    GradientAccumulationHook,
    GradientClipHook,
    GradScalerVetoHook,
    LossScalingHook,
    OptimizerConfig,
    TrainingStrategy,
)
from nvalchemi.training.hooks import TrainingUpdateHook

LAZY = pytest.mark.parametrize("lazy", [False, True])


def samples(batch):
    """How many samples a batch has."""
    return len(batch[0])


class Torchs(TrainingUpdateHook):
    """Scales by torch's own scaler."""

    priority = 20
    reads_grad = False

    def __init__(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)

    def before_batch(self, ctx, *, will_skip):
        ctx.grad_scaler = self.scaler
        return True

    def transform_loss(self, ctx, loss):
        return self.scaler.scale(loss)


def train(hooks, batches, *, lazy=False):
    """Return the strategy after two epochs."""
    strategy = make(hooks, lazy=lazy)
    strategy.run(batches)
    return strategy


def make(hooks, *, lazy=False):
    torch.manual_seed(1)
    return TrainingStrategy(
        models=nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)),
        optimizer_configs=OptimizerConfig(optimizer_cls="AdamW", optimizer_kwargs={"lr": 0.02, "fused": True}),
        training_fn=lambda model, batch: model(batch[0]),
        loss_fn=lambda predictions, batch: (predictions - batch[1]).square().mean(),
        hooks=hooks,
        num_epochs=2,
        progress=False,
        lazy=lazy,
    )


@pytest.fixture
def big():
    """Five batches of twelve samples."""
    generator = torch.Generator().manual_seed(3)
    xs = [torch.randn(12, 3, generator=generator) for _ in range(5)]
    return [(x, x.sum(1, keepdim=True).sin()) for x in xs]


@pytest.fixture
def cut(big):
    """The same in micro-batches of 5, 4 and 3, four of which are no multiple of a window of three."""
    return [part for x, y in big for part in zip(x.split([5, 4, 3]), y.split([5, 4, 3]), strict=True)]


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def others(scaling):
    return [
        *([scaling()] if scaling else []),
        GradScalerVetoHook(),
        GradientClipHook(max_norm=0.05),
        EMAHook(decay=0.9),
    ]


@LAZY
@pytest.mark.parametrize("scaling", [None, lambda: LossScalingHook(init_scale=256.0, growth_interval=2), Torchs])
def test_a_window_is_one_big_batch_to_every_other_hook(big, cut, scaling, lazy):
    """Scaled, checked, clipped and averaged once a window: weights, average and scale are those of the big batches."""
    whole, parts = others(scaling), others(scaling)
    one = train(whole, big, lazy=lazy)
    many = train([GradientAccumulationHook(steps=3, weight=samples), *parts], cut, lazy=lazy)
    torch.testing.assert_close(weights_of(many.models["main"]), weights_of(one.models["main"]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        weights_of(parts[-1].get_averaged_model()), weights_of(whole[-1].get_averaged_model()), rtol=1e-5, atol=1e-6
    )
    assert parts[-1].num_updates == whole[-1].num_updates == one.step_count == many.step_count == 10
    assert float(parts[-2].last_norm) == pytest.approx(float(whole[-2].last_norm), rel=1e-4)
    if scaling:
        assert scale_of(parts[0]) == scale_of(whole[0]) > 256.0


def scale_of(hook):
    return hook.scaler.get_scale() if isinstance(hook, Torchs) else hook.state_dict()["scale"]


@LAZY
def test_a_window_longer_than_the_epoch(big, lazy):
    """Four to a step and three batches: scaler, clipping and norm raise nothing; one step, and its norm is bounded."""
    norms = []

    class Monitor(TrainingUpdateHook):
        def after_optimizer_step(self, ctx, *, skipped):
            if ctx.window_complete:
                norms.append(torch.cat([g.flatten() for g in ctx.gradients.values()]).norm().item())

    hooks = [GradientAccumulationHook(steps=4), LossScalingHook(init_scale=64.0), GradientClipHook(max_norm=0.01)]
    strategy = train([*hooks, Monitor()], big[:3], lazy=lazy)
    assert strategy.step_count == 2
    assert norms == pytest.approx([0.01, 0.01], rel=1e-4)


@pytest.mark.parametrize("steps", [2, 3])
def test_clipping_acts_on_the_whole_gradient(steps):
    """Micro-gradients (3, 0) and (0, 4) clipped to 1 are (0.6, 0.8), in a full window and in a partial one."""
    weight = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(weight.weight)
    strategy = TrainingStrategy(
        models=weight,
        optimizer_configs=OptimizerConfig(optimizer_cls="SGD", optimizer_kwargs={"lr": 1.0}),
        loss_fn=lambda predictions, batch: 2 * predictions.sum(),
        hooks=[GradientAccumulationHook(steps=steps), GradientClipHook(max_norm=1.0)],
        num_epochs=1,
        progress=False,
    )
    strategy.run([torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]])])
    torch.testing.assert_close(weight.weight.detach(), torch.tensor([[-0.6, -0.8]]))


def test_an_overflow_backs_the_scale_off_once(big):
    """A nan in one micro-batch of three vetoes the window for every hook, and the scale is halved once."""
    x, y = big[0]
    bad = [(x, y), (x, y * torch.nan), (x, y)]
    scaling, average = LossScalingHook(init_scale=256.0), EMAHook(decay=0.9)
    strategy = train([GradientAccumulationHook(steps=3), scaling, average], [*bad, *big[:3]])
    assert (strategy.step_count, average.num_updates) == (2, 2)
    assert scaling.state_dict()["scale"] == 64.0  # two epochs


def test_normalising_costs_no_pass_of_its_own(cut):
    """What a weighted window is divided by goes along in the fused step, with scale and clipping factor."""
    hooks = [GradientAccumulationHook(steps=3, weight=samples), LossScalingHook(), GradientClipHook(max_norm=0.05)]
    strategy = train(hooks, cut)
    assert [one.division for one in strategy.orchestrator.last_outcome.optimizers] == ["folded"]


@LAZY
@pytest.mark.parametrize("left_at", [2, 3])
def test_a_state_inside_a_window_is_loaded_into_a_run_that_went_on(cut, lazy, left_at):
    """Whether that run is inside a window or has ended one with unscaled gradients, it goes on as a new one would."""
    strategy, straight = (
        make([GradientAccumulationHook(steps=3), *others(lambda: LossScalingHook(init_scale=256.0))], lazy=lazy)
        for _ in range(2)
    )
    strategy.train_batch(cut[0])
    state = strategy.state_dict()
    for batch in cut[1:left_at]:
        strategy.train_batch(batch)
    strategy.load_state_dict(state)
    for batch in cut[1:]:
        strategy.train_batch(batch)
    for batch in cut:
        straight.train_batch(batch)
    assert torch.equal(weights_of(strategy.models["main"]), weights_of(straight.models["main"]))
