"""A spawned process that goes on with what was pickled; run by path."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

from nvalchemi.hooks import TrainContext
from nvalchemi.testing import tiny_batches
from nvalchemi.training import TrainingStage


def go_on(model, optimizer, update, batches, steps):
    """Train on batches, in a loop by hand around an orchestrator."""
    for x, y in batches:
        with TrainContext(models={"main": model}, optimizers=[optimizer], step_count=steps) as ctx:
            update(ctx, TrainingStage.BEFORE_BATCH)
            ctx.loss = (model(x) - y).square().mean()
            update(ctx, TrainingStage.DO_BACKWARD)
            update(ctx, TrainingStage.DO_OPTIMIZER_STEP)
            update(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
        steps += not ctx.step_skipped
    return steps


if __name__ == "__main__":
    folder: Path
    folder = globals()["folder"]  # whoever runs this file gives it
    model, optimizer, update, steps = pickle.loads((folder / "pickled").read_bytes())
    go_on(model, optimizer, update, tiny_batches(6)[3:], steps)
    torch.save({"weights": model.state_dict(), "hooks": update.state_dict()}, folder / "result")
