"""A loop in which a test says what loss and what gradient each batch has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateOrchestrator


class Stream:
    """One weight, SGD, and batches of a loss and a gradient each."""

    def __init__(self, *hooks, lazy=False, scaler=None):
        self.weight = nn.Parameter(torch.zeros(1))
        self.optimizers = [torch.optim.SGD([self.weight], lr=1.0, fused=True)]
        self.update = TrainingUpdateOrchestrator(*hooks, lazy=lazy)
        self.steps = self.batches = 0
        self.scaler = scaler

    def batch(self, loss, gradient=None, *, complete=True):
        """Do one batch; the gradient is the loss unless it is given. Return whether the step was skipped."""
        with TrainContext(
            optimizers=self.optimizers, step_count=self.steps, batch_count=self.batches, grad_scaler=self.scaler
        ) as ctx:
            self.update(ctx, TrainingStage.BEFORE_BATCH)
            ctx.window_complete = complete
            term = (self.weight * (loss if gradient is None else gradient)).sum()
            ctx.loss = loss + term - term.detach()
            self.update(ctx, TrainingStage.DO_BACKWARD)
            self.update(ctx, TrainingStage.DO_OPTIMIZER_STEP)
            self.update(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
            self.batches += 1
            skipped = ctx.step_skipped
        self.steps += not skipped
        return skipped

    def skipped(self, losses):
        """Do a batch for each loss; return the numbers of those that were skipped."""
        return [number for number, loss in enumerate(losses) if self.batch(loss)]


@pytest.fixture
def stream():
    """Makes streams."""
    return Stream


@pytest.fixture
def noisy():
    """Makes losses that vary by a tenth around one, the same at each call."""

    def make(count, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return (0.1 * torch.randn(count, generator=generator)).exp().tolist()

    return make
