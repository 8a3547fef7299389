"""One process of several that train a sharded model together; run by path. What it saw goes to a file of its rank."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from nvalchemi.errors import CheckpointWriteError
from nvalchemi.training import (
    CheckpointHook,
    EMAHook,
    GradientClipHook,
    GradScalerVetoHook,
    LossScalingHook,
    ModelSpec,
    OptimizerConfig,
    TrainingStage,
    TrainingStrategy,
    load_training,
    save_checkpoint,
    save_training,
)
from nvalchemi.training.checkpoint import files, sharded
from nvalchemi.training.hooks import TrainingUpdateHook

POISONED = {9: "batch", 23: "shard"}  # what holds a nan, on one rank alone


class Net(nn.Module):
    """Parameters of odd length, more ranks than rows among them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += 1
        return self.last(torch.tanh(self.first(x)))


class Poison:
    """Puts a nan into a gradient after it was reduced, on the last rank alone that holds anything."""

    frequency = 1
    stage = TrainingStage.BEFORE_OPTIMIZER_STEP

    def __call__(self, ctx, stage):
        size = distributed.get_world_size() if distributed.is_initialized() else 1
        last = size == 1 or distributed.get_rank() == min(size - 1, 2)  # of four the last holds nothing
        if POISONED.get(ctx.batch_count) == "shard" and last:
            grads = [getattr(p.grad, "_local_tensor", p.grad) for p in ctx.models["main"].parameters()]
            next(grad for grad in grads if grad.numel()).view(-1)[0] = torch.nan


class Veto(TrainingUpdateHook):
    """Vetoes a step on the last rank alone."""

    reads_grad = False

    def before_optimizer_step(self, ctx, *, will_skip):
        last = distributed.get_rank() == distributed.get_world_size() - 1 if distributed.is_initialized() else True
        return not (last and ctx.batch_count == 17)


def batches(count=70):
    """Rows of the batches for one rank of the batches: every W-th of 8."""
    rank, size = (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)
    made = []
    for number in range(count):
        batch = torch.randn(8, 3, generator=torch.Generator().manual_seed(number))
        if POISONED.get(number) == "batch":
            batch[7, 0] = torch.nan  # of the last rank
        made.append(batch[rank::size])
    return made


def strategy(num_steps, *hooks, fused=True, kind="AdamW", averages=True, plain=True):
    torch.manual_seed(11)
    model = Net()
    if distributed.is_initialized():
        for part in (model.first, model):
            fully_shard(part)
    options = {"lr": 0.02, **({"fused": True} if fused else {})}
    return TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(
            optimizer_cls=kind, optimizer_kwargs=options, scheduler_cls="StepLR", scheduler_kwargs={"step_size": 20}
        ),
        loss_fn=lambda predictions, batch: (predictions - batch.sum(1, keepdim=True).sin()).square().mean(),
        num_steps=num_steps,
        hooks=[
            LossScalingHook(init_scale=2.0**10, growth_interval=15),
            GradScalerVetoHook(),
            GradientClipHook(max_norm=0.5),
            *([EMAHook(decay=0.9)] if averages else []),
            *([Poison(), Veto()] if plain else []),
            *hooks,
        ],
        progress=False,
    )


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def numbers(run):
    """Everything a run is made of, gathered."""
    average = run.hooks[3].get_averaged_model()
    found = {f"live {name}": whole(value) for name, value in run.models["main"].state_dict().items()}
    found |= {f"average {name}": whole(value) for name, value in average.module.state_dict().items()}
    for place, moments in enumerate(run.optimizers[0].state.values()):
        found |= {f"moment {place} {name}": whole(value) for name, value in moments.items()}
    return {name: value.detach().clone() for name, value in found.items()} | {
        "counters": torch.tensor([run.step_count, run.batch_count, run.hooks[3].num_updates, average.n_averaged]),
        "scale": torch.tensor(run.hooks[0].state_dict()["scale"]),
        "lr": torch.tensor(run.optimizers[0].param_groups[0]["lr"]),
    }


def trained(folder):
    """50 steps, with clipping, an average, a loss scale, and vetoes for three reasons."""
    run = strategy(50)
    run.run(batches())
    outcome = run.orchestrator.explain()
    return (
        numbers(run)
        | {"divisions": [one.division for one in run.orchestrator.last_outcome.optimizers]}
        | {"explained": str(outcome)}
    )


def unfused(folder):
    """The same by an optimizer that takes nothing along."""
    run = strategy(30, fused=False, kind="SGD")
    run.run(batches())
    return numbers(run) | {"divisions": [one.division for one in run.orchestrator.last_outcome.optimizers]}


def saved(folder):
    run = strategy(25)
    run.run(batches())
    save_training(folder / "run", run)
    spec = ModelSpec("torch.nn.modules.linear:Linear", {"in_features": 5, "out_features": 1})
    save_checkpoint(folder / "models", models={"last": (fully_shard(spec.build()), spec)})
    return numbers(run)


def loaded(folder):
    """What was saved on two ranks, as it is here, and ten steps later."""
    run = strategy(10)
    load_training(folder / "run", run)
    before = numbers(run)
    run.run(batches())
    return {"before": before, "after": numbers(run)}


@contextmanager
def failing(what, action):
    """Have writing fail on the last rank alone."""
    original = getattr(files, what)

    def fail(*args, **options):
        if distributed.get_rank() == distributed.get_world_size() - 1:
            action()
        return original(*args, **options)

    setattr(sharded, what, fail)
    try:
        yield
    finally:
        setattr(sharded, what, original)


def no_space():
    raise OSError(errno.ENOSPC, "No space left on device")


def message_of(run, root):
    try:
        save_training(root, run)
    except (CheckpointWriteError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def failures(folder):
    """A save that fails on one rank while it writes, and one that fails while the state is taken."""
    run = strategy(2)
    run.run(batches())
    root = folder / "fails"
    save_training(root, run)
    with failing("write_file", no_space):
        full = message_of(run, root)
    hook = run.hooks[1]
    if distributed.get_rank() == 1:
        hook.state_dict = lambda: {"bad": object()}
    unplain = message_of(run, root)
    vars(hook).pop("state_dict", None)
    distributed.barrier()
    left = sorted(path.name.partition("-")[0] for path in root.iterdir())
    load_training(root, strategy(2))
    return {"full": full, "unplain": unplain, "left": left}


def hooked(folder):
    """`CheckpointHook`: the last two and the best, written by threads while the run goes on."""
    root = folder / "hooked"
    run = strategy(12, CheckpointHook(root=root, every_steps=3, keep=2))
    run.run(batches())
    distributed.barrier()
    kept = sorted(path.name for path in root.glob("step-*"))
    other = strategy(20, CheckpointHook(root=root, every_steps=3, keep=2))
    load_training(root / kept[-1], other)
    other.run(batches())
    distributed.barrier()
    return {"kept": kept, "later": sorted(path.name for path in root.glob("step-*")), "steps": other.step_count}


def hooked_twice(folder):
    """Two runs of one strategy save into one folder; another strategy may not, and every rank says so."""
    root = folder / "hooked twice"
    run = strategy(2, CheckpointHook(root=root, every_steps=2, keep=2))
    run.run(batches())
    run.run(batches())
    other = strategy(2, CheckpointHook(root=root, every_steps=2))
    try:
        other.run(batches())
    except FileExistsError as error:
        return {"left": sorted(path.name for path in root.glob("step-*")), "other": str(error)}


def counted(folder):
    """The collectives of a step, with an average and without."""
    found = {"groups": 2}
    for name, averages in (("with", True), ("without", False)):
        run = strategy(2, averages=averages, plain=False)  # whose hooks all decide alike
        run.run(batches())
        with CommDebugMode() as communication:
            run.train_batch(batches()[2])
        found[name] = communication.get_total_counts()
        found[f"{name}, by kind"] = {str(kind): count for kind, count in communication.get_comm_counts().items()}
    return found


def one_is_killed(folder):
    """The last rank dies while it writes; the others say so, and the earlier checkpoint is whole."""
    run = strategy(2)
    run.run(batches())
    root = folder / "killed"
    save_training(root, run)
    with failing("write_file", lambda: os._exit(0)):
        return {"message": message_of(run, root)}


def main(rank, size, folder, *names):
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store-{size}-{names[0]}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=50),
    )
    torch.set_num_threads(1)
    for name in names:
        torch.save(globals()[name](folder), folder / f"{name}-{rank}-of-{size}")
    if names[-1] != "one_is_killed":
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
