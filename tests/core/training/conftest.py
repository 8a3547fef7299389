"""A loop written by hand, scalers that count, and hooks that write down what they are told."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator


class Weights(nn.Module):
    """One parameter for each given value, named p0, p1, ..."""

    def __init__(self, values) -> None:
        super().__init__()
        for place, value in enumerate(values):
            value = value if isinstance(value, torch.Tensor) else torch.tensor(value)
            self.register_parameter(f"p{place}", nn.Parameter(value.clone()))


class Loop:
    """A user's own loop: each batch hands every parameter the gradient that the test asks for.

    `optimizers` makes the optimizers from the list of parameters; by default SGD with lr 1 over all of them.
    """

    def __init__(self, *hooks, weights=(1.0,), optimizers=None, schedulers=None) -> None:
        self.model = Weights(weights)
        self.parameters = list(self.model.parameters())
        self.optimizers = optimizers(self.parameters) if optimizers else [torch.optim.SGD(self.parameters, lr=1.0)]
        self.schedulers = schedulers(self.optimizers) if schedulers else []
        self.orchestrator = TrainingUpdateOrchestrator(*hooks)
        self.steps = 0
        self.batches = 0

    def context(self, **fields) -> TrainContext:
        return TrainContext(
            models={"main": self.model},
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            step_count=self.steps,
            batch_count=self.batches,
            **fields,
        )

    def loss(self, *gradients) -> torch.Tensor:
        """Return a loss with these gradients; None leaves a parameter out of it."""
        terms = [(p * g).sum() for p, g in zip(self.parameters, gradients, strict=True) if g is not None]
        return sum(terms) if terms else torch.zeros((), requires_grad=True)

    def batch(self, *gradients, **fields) -> TrainContext:
        with self.context(**fields) as ctx:
            self.orchestrator(ctx, TrainingStage.BEFORE_BATCH)
            ctx.loss = self.loss(*gradients)
            self.orchestrator(ctx, TrainingStage.DO_BACKWARD)
            self.orchestrator(ctx, TrainingStage.DO_OPTIMIZER_STEP)
            self.orchestrator(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
        self.steps += not ctx.step_skipped
        self.batches += 1
        return ctx

    @property
    def values(self) -> list[Any]:
        """What the parameters are now."""
        return [parameter.tolist() for parameter in self.parameters]

    @property
    def grads(self) -> list[Any]:
        """What lies in ``.grad`` now."""
        return [None if parameter.grad is None else parameter.grad.tolist() for parameter in self.parameters]


class Recorder(TrainingUpdateHook):
    """Writes down every call as (name, stage, will_skip) in a list that it may share with others."""

    reads_grad = False

    def __init__(self, label: str = "recorder", log: list | None = None, *, priority: int = 50, votes=()) -> None:
        self.labelled(label)
        self.log = [] if log is None else log
        self.priority = priority
        self.votes = dict(votes)  # stage -> what is returned there for `proceed`

    def __call__(self, ctx, stage, will_skip=False):
        self.log.append((self.label, stage.name, will_skip))
        return self.votes.get(stage.name, True), ctx.loss

    def settled(self, ctx, *, skipped) -> None:
        self.log.append((self.label, "settled", skipped))


class Veto(TrainingUpdateHook):
    """Vetoes the optimizer step of the batches that it is told."""

    reads_grad = False

    def __init__(self, *batches: int, label: str = "veto", priority: int = 50) -> None:
        self.batches = batches
        self.labelled(label)
        self.priority = priority

    def before_optimizer_step(self, ctx, *, will_skip):
        return ctx.batch_count not in self.batches


class Divide(TrainingUpdateHook):
    """Asks the window for a division, as a clipping hook does."""

    reads_grad = False
    defers_veto = True
    priority = 30

    def __init__(self, by: float | torch.Tensor) -> None:
        self.by = torch.as_tensor(by)

    def before_optimizer_step(self, ctx, *, will_skip):
        ctx.window.divide(self.by)
        return True


class Read(TrainingUpdateHook):
    """Reads ``.grad`` and keeps what it sees."""

    def __init__(self, label: str = "read", priority: int = 40) -> None:
        self.labelled(label)
        self.priority = priority
        self.seen: list[list[torch.Tensor]] = []

    def before_optimizer_step(self, ctx, *, will_skip):
        grads = [p.grad for optimizer in ctx.optimizers for group in optimizer.param_groups for p in group["params"]]
        self.seen.append([grad.clone() for grad in grads if grad is not None])
        return True


class Scale(TrainingUpdateHook):
    """Publishes a scaler and scales the loss with it."""

    reads_grad = False
    priority = 20

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler

    def before_batch(self, ctx, *, will_skip):
        ctx.grad_scaler = self.scaler
        return True

    def transform_loss(self, ctx, loss):
        return self.scaler.scale(loss)


class CountingScaler(torch.amp.GradScaler):
    """torch's scaler on the CPU, with a log of what it was asked."""

    def __init__(self, **options) -> None:
        super().__init__("cpu", **{"init_scale": 8.0, "growth_interval": 2000} | options)
        self.log: list[str] = []
        self.unscaled: Counter = Counter()

    def unscale_(self, optimizer):
        self.log.append("unscale_")
        self.unscaled[id(optimizer)] += 1
        super().unscale_(optimizer)

    def step(self, optimizer, *args, **kwargs):
        self.log.append("step")
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale=None):
        self.log.append("update")
        super().update(new_scale)

    @property
    def tracker(self) -> int:
        """How many good steps it has counted towards growth."""
        return self._get_growth_tracker()


class PublicScaler:
    """A scaler of somebody else: the public interface of torch's, and nothing behind it."""

    def __init__(self, scale: float = 8.0) -> None:
        self.factor = scale
        self.found: dict[int, bool] = {}
        self.updates = 0

    def is_enabled(self):
        return True

    def get_scale(self):
        return self.factor

    def scale(self, outputs):
        return outputs * self.factor

    def unscale_(self, optimizer):
        if id(optimizer) in self.found:
            raise RuntimeError("unscale_() was called twice in one window")
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for grad in grads:
            grad.div_(self.factor)
        self.found[id(optimizer)] = not all(bool(grad.isfinite().all()) for grad in grads)

    def step(self, optimizer):
        if not self.found[id(optimizer)]:
            optimizer.step()

    def update(self, new_scale=None):
        assert self.found, "no inf checks were recorded"
        self.updates += 1
        if new_scale is not None:
            self.factor = float(new_scale)
        elif any(self.found.values()):
            self.factor *= 0.5
        self.found.clear()


class FoldingScaler:
    """A scaler that hands out its divisor and is told how each window ended."""

    def __init__(self, scale: float = 8.0, *, enabled: bool = True) -> None:
        self.factor = scale
        self.enabled = enabled
        self.closed: list[bool | None] = []

    def is_enabled(self):
        return self.enabled

    def scale(self, loss):
        return loss * self.factor

    def divisor(self, device):
        return torch.tensor(self.factor, device=device)

    def close(self, found_inf):
        self.closed.append(found_inf)


@pytest.fixture(scope="session")
def make_loop():
    """The class of loops written by hand."""
    return Loop


@pytest.fixture(scope="session")
def recorder():
    """The class of hooks that write down what they are told."""
    return Recorder


@pytest.fixture(scope="session")
def veto():
    """The class of hooks that veto the batches they are told."""
    return Veto


@pytest.fixture(scope="session")
def divide():
    """The class of hooks that ask for a division."""
    return Divide


@pytest.fixture(scope="session")
def read():
    """The class of hooks that read ``.grad``."""
    return Read


@pytest.fixture(scope="session")
def scale():
    """The class of hooks that scale the loss with a given scaler."""
    return Scale


@pytest.fixture(scope="session")
def counting_scaler():
    """torch's scaler, counting."""
    return CountingScaler


@pytest.fixture(scope="session")
def public_scaler():
    """A scaler with the public interface alone."""
    return PublicScaler


@pytest.fixture(scope="session")
def folding_scaler():
    """A scaler that folds."""
    return FoldingScaler


@pytest.fixture(scope="session")
def two_optimizers():
    """Make one SGD with lr 1 for each parameter."""
    return lambda parameters: [torch.optim.SGD([parameter], lr=1.0) for parameter in parameters]
