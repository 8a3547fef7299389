"""A small strategy whose batches are (x, y) pairs, and the same training written by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nvalchemi.training import OptimizerConfig, TrainingStrategy
from nvalchemi.training.hooks import TrainingUpdateHook
from nvalchemi_hooks_grad_accum import GradientAccumulationHook


class Seen(TrainingUpdateHook):
    """Writes down what becomes of every batch, at the end of it."""

    reads_grad = False

    def __init__(self):
        self.complete, self.norms, self.skipped = [], [], []

    def after_optimizer_step(self, ctx, *, skipped):
        self.complete.append(ctx.window_complete)
        self.skipped.append(skipped)
        if ctx.window_complete:
            self.norms.append(float(ctx.grad_norm))


class Plain:
    """A plain hook at one stage."""

    frequency = 1

    def __init__(self, stage, act, frequency=1):
        self.stage, self.act, self.frequency = stage, act, frequency

    def __call__(self, ctx, stage):
        self.act(ctx)


def square_error(predictions, batch):
    """The mean over the samples of a batch."""
    return (predictions - batch[1]).square().mean()


@pytest.fixture
def seen():
    """A hook that writes down what happens."""
    return Seen()


@pytest.fixture
def plain():
    """The class of plain hooks that do what they are told."""
    return Plain


@pytest.fixture
def make_model():
    """Make the same small model at each call."""

    def make():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    return make


@pytest.fixture
def make_batches():
    """Make batches of the given sizes; the same numbers at each call."""

    def make(*sizes):
        generator = torch.Generator().manual_seed(5)
        xs = [torch.randn(size, 3, generator=generator) for size in sizes]
        return [(x, x.sum(1, keepdim=True).sin()) for x in xs]

    return make


@pytest.fixture
def make_strategy(make_model):
    """Make the small strategy with an accumulating hook, and others."""

    def make(*hooks, accumulate=None, optimizer="SGD", lr=0.1, **options):
        defaults = {
            "models": make_model(),
            "optimizer_configs": OptimizerConfig(optimizer_cls=optimizer, optimizer_kwargs={"lr": lr}),
            "training_fn": lambda model, batch: model(batch[0]),
            "loss_fn": square_error,
            "hooks": [GradientAccumulationHook(**(accumulate or {"steps": 4})), *hooks],
            "progress": False,
            "num_epochs": 1,
        }
        return TrainingStrategy(**{**defaults, **options})

    return make


@pytest.fixture
def weights_of():
    """The weights of a model or a strategy in one vector."""

    def weights(one):
        model = one.models["main"] if isinstance(one, TrainingStrategy) else one
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    return weights


@pytest.fixture
def by_hand(make_model):
    """Return a model trained by the plain loop on windows, each of parts (by what its loss is divided, batch)."""

    def train(windows, optimizer="SGD", lr=0.1):
        model = make_model()
        stepper = getattr(torch.optim, optimizer)(model.parameters(), lr=lr)
        for window in windows:
            stepper.zero_grad()
            for parts, (x, y) in window:
                (square_error(model(x), (x, y)) / parts).backward()
            stepper.step()
        return model

    return train
