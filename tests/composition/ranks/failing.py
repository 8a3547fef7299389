"""A program whose second rank fails in the middle of a run; started by torchrun."""

from __future__ import annotations

import torch

from nvalchemi.training import DDPHook, OptimizerConfig, TrainingStage, TrainingStrategy


class Fails:
    """Raises on one rank at the third batch."""

    frequency, stage = 1, TrainingStage.AFTER_FORWARD

    def __call__(self, ctx, stage):
        if ctx.global_rank == 1 and ctx.batch_count == 2:
            raise ValueError("the third batch of rank 1 is spoilt")


strategy = TrainingStrategy(
    models=torch.nn.Linear(3, 1),
    optimizer_configs=OptimizerConfig(),
    training_fn=lambda model, batch: model(batch),
    loss_fn=lambda y, batch: y.square().mean(),
    num_epochs=1,
    hooks=[DDPHook(), Fails()],
)
strategy.run([torch.ones(2, 3)] * 20)
