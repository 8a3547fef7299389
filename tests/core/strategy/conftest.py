"""A small strategy, batches, and hooks that do what the test tells them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nvalchemi.training import OptimizerConfig, TrainingStage, TrainingStrategy
from nvalchemi.training.hooks import TrainingUpdateHook


class Plain:
    """A plain hook at the given stages (all, if none is given) that calls ``do(ctx, stage)``."""

    stage: TrainingStage | None = None

    def __init__(self, do: Callable[[Any, TrainingStage], Any], *stages: TrainingStage, frequency: int = 1) -> None:
        self.do = do
        self.stages = stages or tuple(TrainingStage)
        self.frequency = frequency

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        return stage in self.stages

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        self.do(ctx, stage)


class Managed(Plain):
    """A plain hook that writes down how it was entered and left."""

    def __init__(self, log: list, name: str = "hook") -> None:
        super().__init__(lambda ctx, stage: None, TrainingStage.AFTER_BATCH)
        self.log = log
        self.name = name

    def __enter__(self):
        self.log.append(f"enter {self.name}")
        return self

    def __exit__(self, kind, error, traceback):
        self.log.append(f"exit {self.name} {None if kind is None else kind.__name__}")
        return True  # asks to swallow the error, which nobody may grant


class Veto(TrainingUpdateHook):
    """Vetoes the optimizer step of the batches that it is told; of all, if it is told none."""

    reads_grad = False

    def __init__(self, *batches: int, reason: str = "") -> None:
        self.batches = batches
        self.reason = reason

    def before_optimizer_step(self, ctx, *, will_skip):
        if self.batches and ctx.batch_count not in self.batches:
            return True
        if self.reason:
            ctx.note_veto(self.reason)
        return False


class Trace(TrainingUpdateHook):
    """Writes down (key, stage) in a list that it may share with others."""

    reads_grad = False

    def __init__(self, log: list | None = None, *, priority: int = 50) -> None:
        self.log = [] if log is None else log
        self.priority = priority

    def __call__(self, ctx, stage, will_skip=False):
        self.log.append((self.state_key, stage.name))
        return True, ctx.loss


class Average(TrainingUpdateHook):
    """Keeps a running mean of a model, as an averaging hook does, without being one of ours."""

    reads_grad = False

    def __init__(self, model_key: str = "main", start: int = 0) -> None:
        self.model_key = model_key
        self.start = start
        self.averaged = None

    def setup(self, ctx):
        self.averaged = torch.optim.swa_utils.AveragedModel(ctx.models[self.model_key])

    def after_optimizer_step(self, ctx, *, skipped):
        if not skipped and ctx.step_count >= self.start:
            self.averaged.update_parameters(ctx.models[self.model_key])

    def get_averaged_model(self):
        if self.averaged is None:
            raise RuntimeError("There is no averaged model yet.")
        return self.averaged


def _square_error(predictions, batch):
    return (predictions - batch[1]).square().mean()


@pytest.fixture(autouse=True)
def _seeded():
    """Every test begins with the same random numbers."""
    torch.manual_seed(0)


@pytest.fixture
def batches():
    """Four batches of pairs (x, y)."""
    return [(torch.randn(3, 2), torch.randn(3, 1)) for _ in range(4)]


@pytest.fixture
def make_strategy():
    """Make a strategy that trains a linear model with SGD for one epoch, unless told otherwise."""

    def make(*hooks, **options) -> TrainingStrategy:
        defaults = {
            "models": nn.Linear(2, 1),
            "optimizer_configs": OptimizerConfig(optimizer_cls="SGD", optimizer_kwargs={"lr": 0.1}),
            "training_fn": lambda model, batch: model(batch[0]),
            "loss_fn": _square_error,
            "hooks": list(hooks),
            "progress": False,
        }
        if "num_steps" not in options and "num_epochs" not in options:
            options["num_epochs"] = 1
        return TrainingStrategy(**{**defaults, **options})

    return make


@pytest.fixture
def square_error():
    """The loss of the small strategy."""
    return _square_error


@pytest.fixture
def plain():
    """The class of plain hooks that do what they are told."""
    return Plain


@pytest.fixture
def managed():
    """The class of hooks that are entered and left."""
    return Managed


@pytest.fixture
def veto():
    """The class of update hooks that veto the batches they are told."""
    return Veto


@pytest.fixture
def trace():
    """The class of update hooks that write down where they are called."""
    return Trace


@pytest.fixture
def average():
    """The class of update hooks that keep an averaged model."""
    return Average
