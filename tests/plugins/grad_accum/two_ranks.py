"""What each of two ranks trains in `test_ranks.py`: run as ``two_ranks.py RANK FOLDER``, through every case."""

from __future__ import annotations

import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from nvalchemi.training import OptimizerConfig, TrainingStage, TrainingStrategy
from nvalchemi_hooks_grad_accum import GradientAccumulationHook

SIZES = [(4, 4), (2, 6), (5, 1), (3, 3), (4, 2), (1, 1)]  # samples of each micro-batch, on either rank
NAN = {"first": [(0, 0)], "last": [(3, 1)], "all": [(place, rank) for place in range(4) for rank in range(2)]}
CASES = {
    "plain": {"steps": 4},
    "weighted": {"steps": 4, "weight": "two_ranks:samples"},
    "veto": {"steps": 4, "nan": "first"},
    "drop first": {"steps": 4, "weight": "two_ranks:samples", "on_nonfinite": "drop", "nan": "first"},
    "drop last": {"steps": 4, "weight": "two_ranks:samples", "on_nonfinite": "drop", "nan": "last"},
    "drop all": {"steps": 4, "on_nonfinite": "drop", "nan": "all"},
    "sharded": {"steps": 4, "weight": "two_ranks:samples", "sharded": True},
    "sharded, drop first": {"steps": 4, "on_nonfinite": "drop", "nan": "first", "sharded": True},
    "sharded, drop last": {"steps": 4, "on_nonfinite": "drop", "nan": "last", "sharded": True},
}
SCATTER = "reduce_scatter_single" if hasattr(distributed, "reduce_scatter_single") else "reduce_scatter_tensor"


def samples(batch):
    """How many samples a batch has."""
    return len(batch[0])


def batches_of(rank, nan=None):
    """Return the micro-batches of a rank; those that `nan` names have a target that is not finite."""
    generator = torch.Generator().manual_seed(5)
    batches = []
    for place, sizes in enumerate(SIZES):
        both = [torch.randn(size, 3, generator=generator) for size in sizes]
        y = both[rank].sum(1, keepdim=True).sin()
        batches.append((both[rank], y * torch.nan if (place, rank) in NAN.get(nan, ()) else y))
    return batches


def make_model():
    """Return the same model on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


class Wrap:
    """Wraps the model in DDP, or shards it, and counts reductions."""

    frequency, stage = 1, TrainingStage.SETUP

    def __init__(self, *, sharded):
        self.sharded, self.reductions = sharded, 0

    def __call__(self, ctx, stage):
        """Wrap."""
        if self.sharded:
            fully_shard(ctx.models["main"], mesh=init_device_mesh("cpu", (2,)))
            return
        ctx.models["main"] = model = DistributedDataParallel(ctx.models["main"])
        model.register_comm_hook(None, self._count)

    def _count(self, state, bucket):
        self.reductions += 1
        return default_hooks.allreduce_hook(None, bucket)

    def counting(self, scatter, *arguments, **options):
        """Count a reduction of sharded gradients, and do it."""
        self.reductions += 1
        return scatter(*arguments, **options)


def train(rank, *, nan=None, sharded=False, **accumulate):
    """Return weights, steps, and reductions of one case."""
    wrap = Wrap(sharded=sharded)
    strategy = TrainingStrategy(
        models=make_model(),
        optimizer_configs=OptimizerConfig(optimizer_cls="SGD", optimizer_kwargs={"lr": 0.1}),
        training_fn=lambda model, batch: model(batch[0]),
        loss_fn=lambda predictions, batch: (predictions - batch[1]).square().mean(),
        hooks=[wrap, GradientAccumulationHook(**accumulate)],
        num_epochs=1,
        progress=False,
    )
    with patch.object(distributed, SCATTER, partial(wrap.counting, getattr(distributed, SCATTER))):
        strategy.run(batches_of(rank, nan))
    parameters = strategy.models["main"].parameters()
    weights = torch.cat([(p.full_tensor() if sharded else p).detach().flatten() for p in parameters])
    return {"weights": weights, "steps": strategy.step_count, "reductions": wrap.reductions}


if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "store"), 2)
    distributed.init_process_group("gloo", rank=rank, world_size=2, store=store, timeout=timedelta(seconds=30))
    torch.save({name: train(rank, **case) for name, case in CASES.items()}, folder / f"{rank}.pt")
    distributed.destroy_process_group()
