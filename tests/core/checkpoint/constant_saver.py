"""A run that saves after every batch; run by path, it starts one for every folder that it is told, until it is killed.

The process that is started imports torch once and forks, so that a run takes a fraction of a second.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nvalchemi.training import OptimizerConfig, TrainingStage, TrainingStrategy, save_training

STEPS = 10


class SaveAlways:
    """Saves into one folder after every batch."""

    frequency = 1
    stage = TrainingStage.AFTER_BATCH

    def __init__(self, root):
        self.root = root

    def __call__(self, ctx, stage):
        """Save."""
        save_training(self.root, ctx.workflow)


def make_strategy(*hooks):
    """Return the run; the same at each call."""
    torch.manual_seed(1)
    return TrainingStrategy(
        models=nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1)),
        optimizer_configs=OptimizerConfig(optimizer_kwargs={"lr": 0.05}),
        training_fn=lambda model, batch: model(batch[0]),
        loss_fn=lambda predictions, batch: (predictions - batch[1]).square().mean(),
        hooks=hooks,
        num_steps=STEPS,
        progress=False,
    )


def make_loader():
    """Return a shuffling loader of five batches."""
    x = torch.linspace(-1, 1, 120).reshape(20, 6)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)


if __name__ == "__main__":
    make_strategy().run(make_loader())  # everything that is imported late is imported now
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            make_strategy(SaveAlways(line.strip())).run(make_loader())
            os._exit(0)
        print(child, flush=True)
        os.waitpid(child, 0)
        print("over", flush=True)
