"""Three steps with a hook that comes from elsewhere; run by path, in this process or in a spawned one."""

from __future__ import annotations

from pathlib import Path

import torch

from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator

STAGES = (TrainingStage.DO_BACKWARD, TrainingStage.DO_OPTIMIZER_STEP, TrainingStage.AFTER_OPTIMIZER_STEP)


def train(hook: TrainingUpdateHook, out: Path) -> None:
    """Save the weights that come of three steps, the second with an inf, and what the hook counted."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    update = TrainingUpdateOrchestrator(hook)
    for gradient in ([3.0, 4.0], [torch.inf, 0.0], [0.1, 0.2]):
        with TrainContext(optimizers=[optimizer]) as ctx:
            update(ctx, TrainingStage.BEFORE_BATCH)
            ctx.loss = weight @ torch.tensor(gradient)
            for stage in STAGES:
                update(ctx, stage)
    torch.save({"weight": weight.data, "state": update.state_dict()}, out)


if __name__ == "__main__":
    train(hook, out)  # type: ignore[name-defined]  # noqa: F821  # whoever runs this file gives both
