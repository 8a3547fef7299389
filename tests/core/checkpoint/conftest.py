"""A small run with everything that can be lost: dropout, shuffling, momentum, a scheduler, hooks with state."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nvalchemi.training import OptimizerConfig, TrainingStage, TrainingStrategy, load_training, save_training
from nvalchemi.training.hooks import TrainingUpdateHook

VOLATILE = {"state.position.now.running"}


class Counting(TrainingUpdateHook):
    """Counts steps, and adds up weights in a tensor; refuses a negative count."""

    def __init__(self):
        self.steps = 0
        self.sum = torch.zeros(3)

    def settled(self, ctx, *, skipped):
        self.steps += not skipped
        self.sum += next(ctx.models["main"].parameters()).detach().flatten()[:3]

    def state_dict(self):
        return {"steps": self.steps, "sum": self.sum.clone()}

    def load_state_dict(self, state):
        if state["steps"] < 0:
            raise ValueError(f"steps is {state['steps']}")
        self.steps, self.sum = state["steps"], state["sum"].clone()


class Plain:
    """A plain hook that does what it is told, and has state if it is given some."""

    frequency = 1

    def __init__(self, act, stage=TrainingStage.AFTER_BATCH, frequency=1):
        self.act, self.stage, self.frequency = act, stage, frequency

    def __call__(self, ctx, stage):
        self.act(ctx, stage)


class Jitter(TrainingUpdateHook):
    """Draws from every generator there is, so that a run depends on all of them."""

    reads_grad = False

    def transform_loss(self, ctx, loss):
        return loss * (1 + 0.1 * (random.random() + float(numpy.random.random()) + float(torch.rand(()))))


class VetoAt(TrainingUpdateHook):
    """Vetoes the batches of the given numbers."""

    def __init__(self, *batches):
        self.batches = batches

    def before_optimizer_step(self, ctx, *, will_skip):
        return ctx.batch_count not in self.batches


class Accumulate(TrainingUpdateHook):
    """One step for every two batches."""

    priority = 10

    def before_batch(self, ctx, *, will_skip):
        ctx.window_complete = ctx.batch_count % 2 == 1
        return ctx.batch_count % 2 == 0


@pytest.fixture
def kinds():
    """The hooks of these tests, by name."""
    return {c.__name__: c for c in (Counting, Plain, Jitter, VetoAt, Accumulate)}


def seed(number):
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


@pytest.fixture
def make_loader():
    """A shuffling DataLoader with six batches; with a generator of its own if it is given a seed."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(24, 6, generator=generator)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())

    def make(own_seed=None, **options):
        own = None if own_seed is None else torch.Generator().manual_seed(own_seed)
        return DataLoader(data, batch_size=4, shuffle=True, generator=own, **options)

    return make


@pytest.fixture
def make_strategy():
    """Make the small run; the same numbers at each call."""

    def make(*hooks, **options):
        seed(1)
        defaults = {
            "models": nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1)),
            "optimizer_configs": OptimizerConfig(
                optimizer_kwargs={"lr": 0.05}, scheduler_cls="StepLR", scheduler_kwargs={"step_size": 3, "gamma": 0.5}
            ),
            "training_fn": lambda model, batch: model(batch[0]),
            "loss_fn": lambda predictions, batch: (predictions - batch[1]).square().mean(),
            "hooks": list(hooks) or [Counting(), Jitter()],
            "progress": False,
        }
        if "num_epochs" not in options:
            defaults["num_steps"] = 10
        return TrainingStrategy(**{**defaults, **options})

    return make


def flat(value, where="state"):
    """Every leaf of a state by its place."""
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{where}.{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for place, item in enumerate(value) for k, v in flat(item, f"{where}[{place}]").items()}
    return {where: value}


def _differences(one, other):
    a, b = flat(one), flat(other)
    same = defaultdict(
        bool, {k: torch.equal(a[k], b[k]) if torch.is_tensor(a[k]) else a[k] == b[k] for k in a if k in b}
    )
    return [key for key in {**a, **b} if not same[key]]


@pytest.fixture
def differences():
    """The places at which two states differ, bit for bit."""
    return _differences


@pytest.fixture
def reseed():
    """Seed all generators with a number."""
    return seed


@pytest.fixture
def resume(make_strategy, make_loader, tmp_path, differences, reseed):
    """Return how a run saved by a hook at a moment, and gone on with from there, differs from one that just ran."""

    def check(stage, at, *, hooks=lambda: (), loader=make_loader, own_seed=None, options=dict, **more):
        def save(ctx, fired):
            if at(ctx) and not list(tmp_path.iterdir()):
                save_training(tmp_path, ctx.workflow)

        saver = Saver(stage, save)
        straight = make_strategy(*hooks(), saver, **options(), **more)
        straight.run(loader(own_seed))
        assert list(tmp_path.iterdir()), "the moment of saving never came"
        resumed = make_strategy(*hooks(), Saver(stage, lambda ctx, fired: None), **options(), **more)
        reseed(99)
        load_training(tmp_path, resumed)
        resumed.run(loader(own_seed))
        return [where for where in differences(straight.state_dict(), resumed.state_dict()) if where not in VOLATILE]

    class Saver:
        frequency = 1

        def __init__(self, stage, act):
            self.stage, self.act = stage, act

        def __call__(self, ctx, stage):
            self.act(ctx, stage)

    return check
