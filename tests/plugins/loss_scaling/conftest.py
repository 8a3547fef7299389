"""One batch through an orchestrator, as a hand-written loop does it, and the doubles that share it with a scaler."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator


def _run_batch(
    update: TrainingUpdateOrchestrator, loss: Callable[[], Tensor], optimizers: list[Any], **fields: Any
) -> TrainContext:
    with TrainContext(optimizers=optimizers, **fields) as ctx:
        update(ctx, TrainingStage.BEFORE_BATCH)
        ctx.loss = loss()
        update(ctx, TrainingStage.DO_BACKWARD)
        update(ctx, TrainingStage.DO_OPTIMIZER_STEP)
        update(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
    return ctx


class FiniteVeto(TrainingUpdateHook):
    """What a veto hook does: inf or nan in any gradient, and no optimizer steps."""

    priority = 25
    reads_grad = False
    defers_veto = True

    def before_optimizer_step(self, ctx, *, will_skip):
        ctx.defer_veto(ctx.window.nonfinite(), "gradients are not finite", found_inf=True)
        return True


class VetoBatches(TrainingUpdateHook):
    """Veto chosen batches, whatever their gradients."""

    reads_grad = False

    def __init__(self, *batches):
        self.batches = batches
        self.seen = -1

    def before_optimizer_step(self, ctx, *, will_skip):
        self.seen += 1
        return self.seen not in self.batches


class EarlyVeto(VetoBatches):
    """The same before any scaler acts."""

    priority = 5


class ClipInPlace(TrainingUpdateHook):
    """What anybody would write: look at ``.grad``, clip it there."""

    priority = 30
    norms: list[float]

    def __init__(self):
        self.norms = []

    def before_optimizer_step(self, ctx, *, will_skip):
        parameters = [p for optimizer in ctx.optimizers for group in optimizer.param_groups for p in group["params"]]
        self.norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))
        return True


class Accumulate(TrainingUpdateHook):
    """Keep the window open for all but every n-th batch; `last` closes it early."""

    priority = 10
    reads_grad = False

    def __init__(self, every, last=None):
        self.every, self.last, self.batches = every, last, 0

    def before_batch(self, ctx, *, will_skip):
        first = self.batches % self.every == 0
        self.batches += 1
        ctx.window_complete = self.batches % self.every == 0 or self.batches == self.last
        return first


class HostReads(TorchDispatchMode):
    """Count what a step asks the host to wait for, and everything it launches."""

    def __init__(self):
        super().__init__()
        self.reads = []
        self.launches = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in {"_local_scalar_dense", "equal", "nonzero", "masked_select", "is_nonzero"}:
            self.reads.append(name)
        elif name != "detach":
            self.launches.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="session")
def run_batch():
    return _run_batch


@pytest.fixture(scope="session")
def doubles():
    """The update hooks that share an orchestrator with a scaler in these tests."""
    return SimpleNamespace(
        FiniteVeto=FiniteVeto,
        VetoBatches=VetoBatches,
        EarlyVeto=EarlyVeto,
        ClipInPlace=ClipInPlace,
        Accumulate=Accumulate,
    )


@pytest.fixture(scope="session")
def host_reads():
    return HostReads


@pytest.fixture(scope="session")
def scalar():
    """Make one parameter that starts at a value."""
    return lambda value=1.0, dtype=torch.float32: torch.nn.Parameter(torch.tensor(value, dtype=dtype))
