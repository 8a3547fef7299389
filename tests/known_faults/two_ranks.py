"""One of two processes that train together; run by path. Each job leaves its result, or its error, in a file."""

from __future__ import annotations

import os
import traceback
from contextlib import nullcontext
from importlib.util import find_spec

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel

from nvalchemi.hooks import TrainContext
from nvalchemi.testing import TinyModel, tiny_batches
from nvalchemi.training import OptimizerConfig, TrainingStrategy

SHARDED = [torch.arange(5.0) + step for step in range(3)]


def replicated():
    """A replica, and the calls that reduced its gradients."""
    torch.manual_seed(0)
    model, calls = nn.parallel.DistributedDataParallel(TinyModel()), []
    model.register_comm_hook(None, lambda group, bucket: calls.append(1) or allreduce_hook(group, bucket))
    return model, calls


def square_error(predictions, batch):
    """The loss of the tiny model."""
    return (predictions - batch[1]).square().mean()


def result(model, calls):
    """Reductions, and weights as they are."""
    return {"reductions": len(calls), "weights": {name: p.detach() for name, p in model.module.named_parameters()}}


def accumulated(rank):
    """Two windows of four batches, by the hook."""
    model, calls = replicated()
    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(optimizer_cls="SGD", optimizer_kwargs={"lr": 0.1}),
        training_fn=lambda model, batch: model(batch[0]),
        loss_fn=square_error,
        num_epochs=1,
        progress=False,
        hooks=[{"grad_accum": {"steps": 4}}],
    )
    for batch in tiny_batches(16)[rank::2]:
        strategy.train_batch(batch)
    return result(model, calls)


def accumulated_naively(rank):
    """The same, with reduction switched off around the backward pass only."""
    model, calls = replicated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for place, batch in enumerate(tiny_batches(16)[rank::2]):
        loss = square_error(model(batch[0]), batch) / 4
        with nullcontext() if place % 4 == 3 else model.no_sync():
            loss.backward()
        if place % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    return result(model, calls)


def sharded_model():
    """A weight of five elements: three on one rank and two on the other."""
    return fully_shard(nn.Linear(1, 5, bias=False), mesh=init_device_mesh("cpu", (2,)))


def follow(rank, update):
    """Give the live weights three values, and have an average follow them."""
    model = sharded_model()
    for step, weights in enumerate(SHARDED):
        with torch.no_grad():
            model.weight.to_local().copy_(weights.chunk(2)[rank].unsqueeze(1))
        update(model, step)
    return model


def sharded(rank):
    """The average of a sharded copy, gathered."""
    from nvalchemi.training import EMAHook

    class OfShards(EMAHook):
        def _build_averaged_model(self, source):
            averaged = AveragedModel(nn.Identity())
            averaged.module = sharded_model()
            return averaged

    hook = OfShards(decay=0.75)
    follow(rank, lambda model, step: hook.after_optimizer_step(
        TrainContext(models={"main": model}, step_count=step), skipped=False))  # fmt: skip
    return {"average": hook.get_averaged_model().module.weight.full_tensor().flatten().tolist()}


def sharded_naively(rank):
    """The average of what this rank holds."""
    average = []

    def update(model, step):
        live = model.weight.to_local().detach().clone()
        average[:] = [average[0].lerp(live, 0.25) if average else live]

    follow(rank, update)
    return {"average": average[0].flatten().tolist()}


def main(rank, folder):
    """Do every job for which the plugins are there."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    needed = {accumulated: "nvalchemi_hooks_grad_accum", sharded: "nvalchemi_hooks_ema"}
    for job in (accumulated, accumulated_naively, sharded, sharded_naively):
        if find_spec(needed.get(job, "torch")) is None:
            continue
        try:
            done = job(rank)
        except Exception:  # whatever went wrong is the result
            done = {"error": traceback.format_exc()}
        torch.save(done, folder / f"{job.__name__}{rank}")
        distributed.barrier()
    os._exit(0)  # threads of gloo may outlive their work


if __name__ == "__main__":
    main(globals()["rank"], globals()["folder"])  # whoever runs this file gives both
