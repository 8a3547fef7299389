"""One of two processes that train together; run by path in spawned processes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import distributed

from nvalchemi.errors import NonFiniteGradientError
from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateOrchestrator
from nvalchemi_hooks_scaler_veto import GradScalerVetoHook


def train(rank: int, folder: Path) -> None:
    """Save weight, skips and error of a run in which only rank 0 meets an inf, in batches 1, 3 and 4 of 5."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    weight, hook = torch.nn.Parameter(torch.zeros(())), GradScalerVetoHook(max_consecutive_skips=2)
    optimizer, update = torch.optim.SGD([weight], lr=1.0), TrainingUpdateOrchestrator(hook)
    skipped, error = [], ""
    try:
        for batch in range(5):
            with TrainContext(models={"main": torch.nn.ParameterDict({"w": weight})}, optimizers=[optimizer]) as ctx:
                update(ctx, TrainingStage.BEFORE_BATCH)
                weight.grad = torch.tensor(torch.inf if rank == 0 and batch in (1, 3, 4) else 1.0)
                update(ctx, TrainingStage.DO_OPTIMIZER_STEP)
                skipped.append(ctx.step_skipped)
                update(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
    except NonFiniteGradientError as raised:
        error = str(raised)
    torch.save({"weight": weight.item(), "skipped": skipped, "error": error}, folder / f"rank{rank}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    train(rank, folder)  # type: ignore[name-defined]  # noqa: F821  # whoever runs this file gives both
