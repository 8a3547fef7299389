"""A loop of a user's own, with gradients that the test chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator, UpdatePriority


class ScalesLoss(TrainingUpdateHook):
    """Scales the loss with the scaler that the loop has put into the context."""

    priority = UpdatePriority.SCALE
    reads_grad = False

    def transform_loss(self, ctx: TrainContext, loss: Tensor) -> Tensor:
        return ctx.grad_scaler.scale(loss)


class Accumulates(TrainingUpdateHook):
    """Keeps gradients over the batches of a window, the last of which the loop announces."""

    priority = UpdatePriority.ACCUMULATE
    reads_grad = False
    first = True

    def before_batch(self, ctx: TrainContext, *, will_skip: bool) -> bool:
        zero, self.first = self.first, ctx.batch
        ctx.window_complete = ctx.batch
        return zero


class Loop:
    """Batches through an orchestrator; a gradient is chosen per parameter, or follows from a loss."""

    def __init__(
        self,
        *hooks: TrainingUpdateHook,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any] = (),
        scaler: Any = None,
        models: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self.update = TrainingUpdateOrchestrator(*hooks, *([ScalesLoss()] if scaler is not None else []))
        self.optimizers, self.schedulers, self.scaler, self.models = optimizers, schedulers, scaler, dict(models or {})
        self.steps = 0

    def batch(self, loss: Tensor | Mapping[Tensor, Any], *, last: bool = True) -> TrainContext:
        """Do one batch; `last` says that its window is complete (for `Accumulates`)."""
        with TrainContext(
            batch=last,
            models=self.models,
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            grad_scaler=self.scaler,
            step_count=self.steps,
        ) as ctx:
            self.update(ctx, TrainingStage.BEFORE_BATCH)
            ctx.loss = loss if isinstance(loss, Tensor) else linear(loss)
            self.update(ctx, TrainingStage.DO_BACKWARD)
            self.update(ctx, TrainingStage.DO_OPTIMIZER_STEP)
            self.update(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
        self.steps += not ctx.step_skipped
        return ctx


def linear(gradients: Mapping[Tensor, Any]) -> Tensor:
    """Return a loss with these gradients."""
    terms = [(p * torch.as_tensor(g, dtype=p.dtype)).sum() for p, g in gradients.items()]
    return torch.stack([term.double() for term in terms]).sum()


@pytest.fixture
def loop() -> type[Loop]:
    return Loop


@pytest.fixture
def accumulates() -> type[Accumulates]:
    return Accumulates


@pytest.fixture
def zeros() -> Callable[..., nn.Parameter]:
    """Makes parameters, all elements 0: after a step of SGD with learning rate 1 they are the negative gradient."""

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
        return nn.Parameter(torch.zeros(shape, dtype=dtype))

    return make


@pytest.fixture
def sgd() -> Callable[..., torch.optim.Optimizer]:
    """Makes optimizers that subtract the gradient."""

    def make(*parameters: nn.Parameter) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)

    return make
