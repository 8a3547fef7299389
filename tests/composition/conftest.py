"""A small model, its batches, and all four plugins in one loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator

Batch = tuple[Tensor, Tensor]


@pytest.fixture
def make_model() -> Callable[..., nn.Sequential]:
    """A seeded two-layer network, the same at each call."""

    def make(dtype: torch.dtype = torch.float32) -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)).to(dtype)

    return make


@pytest.fixture
def make_batches() -> Callable[..., list[Batch]]:
    """Seeded batches; those of the given numbers hold an inf."""

    def make(count: int, *, poisoned: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> list[Batch]:
        generator = torch.Generator().manual_seed(2)
        batches = []
        for number in range(count):
            x = torch.randn(16, 6, generator=generator, dtype=torch.float64).to(dtype)
            y = (x.sum(1, keepdim=True) * 3).sin()
            if number in poisoned:
                y[0] = torch.inf
            batches.append((x, y))
        return batches

    return make


@pytest.fixture
def train() -> Callable[..., list[bool]]:
    """Run hooks in a hand-made loop around an orchestrator; returns which steps were skipped."""

    def run(
        model: nn.Module,
        batches: Sequence[Batch],
        hooks: Sequence[TrainingUpdateHook],
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    ) -> list[bool]:
        orchestrator = TrainingUpdateOrchestrator(*hooks)
        schedulers = [] if scheduler is None else [scheduler]
        skipped: list[bool] = []
        with TrainContext(models={"main": model}) as ctx:
            orchestrator(ctx, TrainingStage.SETUP)
        for x, y in batches:
            with TrainContext(
                batch=(x, y),
                models={"main": model},
                optimizers=[optimizer],
                lr_schedulers=schedulers,
                step_count=len(skipped) - sum(skipped),
            ) as ctx:
                orchestrator(ctx, TrainingStage.BEFORE_BATCH)
                ctx.loss = (model(x) - y).square().mean()
                orchestrator(ctx, TrainingStage.DO_BACKWARD)
                orchestrator(ctx, TrainingStage.DO_OPTIMIZER_STEP)
                orchestrator(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
                skipped.append(ctx.step_skipped)
        return skipped

    return run


@pytest.fixture
def weights() -> Callable[[nn.Module], Tensor]:
    """All parameters of a model as one vector."""
    return lambda model: torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
