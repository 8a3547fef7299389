"""A run that saves after every step, until it is killed; run by path, it starts one for every line that it gets.

The process that is started imports torch once and forks, so that a run takes a fraction of a second.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nvalchemi.training import OptimizerConfig, TrainingStrategy, Validation, load_training
from nvalchemi_hooks_checkpoint import CheckpointHook, latest_checkpoint

KEEP = 2


def make_strategy(*hooks, steps=100_000):
    """Return the run; the same at each call."""
    torch.manual_seed(1)
    return TrainingStrategy(
        models=nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1)),
        optimizer_configs=OptimizerConfig(optimizer_kwargs={"lr": 0.01}),
        training_fn=lambda model, batch: model(batch[0]),
        loss_fn=lambda predictions, batch: (predictions - batch[1]).square().mean(),
        validation=Validation(loader=list(make_loader()), every_steps=3),
        hooks=hooks,
        num_steps=steps,
        progress=False,
    )


def make_hook(root):
    """Return the hook that saves all the time."""
    return CheckpointHook(root=root, every_steps=1, keep=KEEP, best="loss")


def make_loader():
    """Return a shuffling loader of five batches."""
    x = torch.linspace(-1, 1, 120).reshape(20, 6)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)


def go_on(root, steps=100_000):
    """Begin or go on, as a script would."""
    strategy = make_strategy(make_hook(root), steps=steps)
    if (latest := latest_checkpoint(root)) is not None:
        load_training(latest, strategy)
    strategy.run(make_loader())
    return strategy


if __name__ == "__main__":
    make_strategy(steps=3).run(make_loader())  # everything that is imported late is imported now
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            go_on(line.strip())
            os._exit(0)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
