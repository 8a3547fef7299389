"""One of two processes that train together; run by path in spawned processes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import distributed

from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateOrchestrator
from nvalchemi_hooks_spike_skip import SpikeSkipHook


def train(rank: int, folder: Path) -> None:
    """Save skips and state of a run in which only rank 0 meets a spike, in batch 10 of 12."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    weight, hook = torch.nn.Parameter(torch.zeros(())), SpikeSkipHook(watch="loss", window=8)
    optimizer, update = torch.optim.SGD([weight], lr=1.0), TrainingUpdateOrchestrator(hook)
    skipped = []
    for batch in range(12):
        with TrainContext(optimizers=[optimizer], batch_count=batch, global_rank=rank) as ctx:
            update(ctx, TrainingStage.BEFORE_BATCH)
            ctx.loss = weight - weight.detach() + (50.0 if rank == 0 and batch == 10 else 1.0 + rank + 0.01 * batch)
            update(ctx, TrainingStage.DO_BACKWARD)
            update(ctx, TrainingStage.DO_OPTIMIZER_STEP)
            skipped.append(ctx.step_skipped)
            update(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
    torch.save({"skipped": skipped, "state": hook.state_dict()}, folder / f"rank{rank}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    train(rank, folder)  # type: ignore[name-defined]  # noqa: F821  # whoever runs this file gives both
