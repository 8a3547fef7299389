"""One of several processes that train together, or one alone; run by path. What it saw goes to a file of its own."""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from nvalchemi.errors import HookConflictError, HookContractError, RanksDifferError
from nvalchemi.hooks import TrainContext
from nvalchemi.training import (
    DDPHook,
    EMAHook,
    FSDPHook,
    GradientAccumulationHook,
    GradientClipHook,
    GradScalerVetoHook,
    LossScalingHook,
    OptimizerConfig,
    SpikeSkipHook,
    TrainingStage,
    TrainingStrategy,
    Validation,
    load_training,
    save_training,
)
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator

BATCH, STEPS, BAD = 8, 50, 13  # the batch over all ranks; steps; and the batch in which one sample is nan
SENT = ("all_reduce", "broadcast", "all_gather", "all_gather_object", "reduce_scatter_tensor", "all_gather_into_tensor")


def world():
    return int(os.environ["WORLD_SIZE"])


def rank():
    return int(os.environ["RANK"])


class Net(nn.Module):
    """Parameters of odd lengths."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 7), nn.Linear(7, 1)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def data(*, poisoned):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH * (STEPS + 1), 3, generator=generator)
    y = x.square().sum(1, keepdim=True) + torch.randn(len(x), 1, generator=generator) / 10
    if poisoned:
        y[BAD * BATCH + 1] = torch.nan  # that of the last but one rank of two, of the second of four
    return TensorDataset(x, y)


class Totals(TrainingUpdateHook):
    """Has every number of samples added up over the ranks."""

    reads_grad, decides_alike = False, True

    def __init__(self):
        self.seen = []

    def transform_loss(self, ctx, loss):
        self.samples = ctx.share(len(ctx.batch[0]))
        return loss

    def before_optimizer_step(self, ctx, *, will_skip):
        self.seen.append((self.samples.total.item(), self.samples.mean.item()))
        return True


def strategy_of(spread, *, lazy=False, steps=STEPS, more=(), scaled=True, validation=None):
    torch.manual_seed(7)
    scaling = [LossScalingHook(init_scale=2.0**10, growth_interval=10)] if scaled else []
    hooks = [spread, *scaling, GradScalerVetoHook(), GradientClipHook(max_norm=1.0), EMAHook(decay=0.9), *more]
    return TrainingStrategy(
        models=Net(),
        optimizer_configs=OptimizerConfig(
            optimizer_cls=torch.optim.AdamW,
            optimizer_kwargs={"lr": 1e-3, "fused": True},
            scheduler_cls=torch.optim.lr_scheduler.StepLR,
            scheduler_kwargs={"step_size": 20},
        ),
        training_fn=lambda model, batch: model(batch[0]),
        loss_fn=lambda predictions, batch: (predictions - batch[1]).square().mean(),
        num_steps=steps,
        hooks=hooks,
        lazy=lazy,
        progress=False,
        validation=validation,
    )


def loader(*, poisoned=False):
    return DataLoader(data(poisoned=poisoned), batch_size=BATCH // world())


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def seen_in(strategy):
    hooks = {type(hook): hook for hook in strategy.orchestrator.iter_hooks()}
    averaged = hooks[EMAHook].get_averaged_model().module
    bare = getattr(strategy.models["main"], "module", strategy.models["main"])
    scaling = hooks.get(LossScalingHook)
    return {
        "weights": {name: whole(p) for name, p in bare.named_parameters()},
        "average": {name: whole(p) for name, p in averaged.named_parameters()},
        "scale": scaling.state_dict() if scaling else None,
        "counters": {
            "steps": strategy.step_count,
            "batches": strategy.batch_count,
            "clipped": hooks[GradientClipHook].clipped_steps,
            "updates": hooks[EMAHook].num_updates,
            "skips": hooks[GradScalerVetoHook].state_dict(),
        },
        "lr": strategy.optimizers[0].param_groups[0]["lr"],
        "norm": float(hooks[GradientClipHook].last_norm),
    }


def trained(hook=DDPHook, *, poisoned=False, **options):
    strategy = strategy_of(hook(timeout=60.0), **options)
    strategy.run(loader(poisoned=poisoned))
    return seen_in(strategy)


def shared():
    totals = Totals()
    strategy = strategy_of(DDPHook(), steps=3, more=[totals])
    strategy.run(loader())
    return totals.seen


def sent(*more, hook=DDPHook, lazy=False):
    """Count what is sent from the second batch to the sixth: gradients by a communication hook, the rest by name."""
    counts, before = Counter(), {}
    strategy = strategy_of(hook(), steps=6, lazy=lazy, more=[Totals(), *more])
    strategy.setup()
    if isinstance(strategy.models["main"], nn.parallel.DistributedDataParallel):

        def reduced(state, bucket):
            counts["gradients"] += 1
            work = distributed.group.WORLD.allreduce([bucket.buffer().div_(world())])
            return work.get_future().then(lambda future: future.value()[0])

        strategy.models["main"].register_comm_hook(None, reduced)

    def counting(name, call, *arguments, **keywords):
        counts[name] += 1
        return call(*arguments, **keywords)

    part = strategy._part_of(loader(), training=True)
    for place, batch in zip(range(6), part, strict=False):
        if place == 1:
            counts.clear()
            before = {name: getattr(distributed, name) for name in SENT}
            for name, call in before.items():
                setattr(distributed, name, partial(counting, name, call))
        strategy.train_batch(batch)
    strategy.orchestrator.resolve()
    for name, call in before.items():
        setattr(distributed, name, call)
    return dict(counts)


def refused(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    return "nothing was refused"


def other_hooks():
    more = [Totals()] if rank() == world() - 1 else []
    return refused(HookConflictError, strategy_of(DDPHook(), more=more).setup)


def other_lengths():
    batches = [(torch.zeros(2, 3), torch.zeros(2, 1))] * (3 + rank())
    return refused(RanksDifferError, lambda: strategy_of(DDPHook(split_data=False)).run(batches))


def accumulated(**options):
    """The weights after windows of two batches."""
    strategy = strategy_of(DDPHook(**options), steps=5, more=[GradientAccumulationHook(steps=2)])
    strategy.run(loader())
    return seen_in(strategy)["weights"]


def other_ends_of_streams():
    """Loaders without a length, of which that of the last rank gives a batch more."""

    class Stream:
        def __iter__(self):
            return iter([(torch.zeros(2, 3), torch.zeros(2, 1))] * (3 + rank()))

    return refused(RanksDifferError, lambda: strategy_of(DDPHook(split_data=False)).run(Stream()))


def other_goals():
    return refused(RanksDifferError, lambda: strategy_of(DDPHook(), steps=3 + rank()).run(loader()))


def too_few_to_validate():
    """One batch for two ranks of a sharded model, which evaluate together."""
    held_out = [(torch.zeros(2, 3), torch.zeros(2, 1))]
    return refused(
        ValueError, lambda: trained(FSDPHook, steps=1, validation=Validation(loader=held_out, every_steps=1))
    )


def meeting(**place):
    """Take a step in a loop of its own, at a place in the data that is said, and give what is refused."""
    weight = nn.Parameter(torch.ones(1))
    orchestrator = TrainingUpdateOrchestrator()

    def step():
        with TrainContext(optimizers=[torch.optim.SGD([weight], lr=1.0)], **place) as ctx:
            orchestrator(ctx, TrainingStage.BEFORE_BATCH)
            ctx.loss = weight.sum()
            orchestrator(ctx, TrainingStage.DO_BACKWARD)
            orchestrator(ctx, TrainingStage.DO_OPTIMIZER_STEP)

    return refused(RanksDifferError, step)


def early_norm():
    """What is said to a plain hook that asks for a norm before the step, where it would take a message."""
    strategy = strategy_of(FSDPHook(shard=["Linear"]), steps=1)

    class Curious:
        frequency, stage = 1, TrainingStage.BEFORE_OPTIMIZER_STEP

        def __call__(self, ctx, stage):
            self.said = refused(HookContractError, lambda: ctx.grad_norm)

    strategy.registry.register(curious := Curious())
    strategy.run(loader())
    return curious.said


def validated():
    held_out = DataLoader(TensorDataset(*(t[:22] for t in data(poisoned=False).tensors)), batch_size=1)
    strategy = strategy_of(DDPHook(), steps=4, validation=Validation(loader=held_out, every_steps=2))
    strategy.run(loader())
    return {**strategy.validation_result, "batches": strategy.validation_result.batches}


def saved(folder):
    """Stop after 20 steps and save, in the middle of a pass."""
    strategy = strategy_of(DDPHook(), steps=20)
    strategy.run(loader(poisoned=True))
    save_training(folder / f"saved-on-{world()}", strategy)
    if distributed.is_initialized():
        distributed.barrier()


def loaded(folder, ranks):
    """Go on with what was saved on so many ranks."""
    strategy = strategy_of(DDPHook(), steps=STEPS - 20)
    load_training(folder / f"saved-on-{ranks}", strategy)
    strategy.run(loader(poisoned=True))
    return seen_in(strategy)


def counted():
    strategy = strategy_of(DDPHook(), steps=2)
    strategy.run(loader())
    return strategy.step_count, strategy.global_step_count


def epochs():
    """The samples of each epoch, shuffled, as this rank has seen them."""
    seen = []

    class Note:
        frequency, stage = 1, TrainingStage.AFTER_BATCH

        def __call__(self, ctx, stage):
            seen.append([ctx.epoch, *ctx.batch[0][:, 0].tolist()])

    torch.manual_seed(0)
    strategy = TrainingStrategy(
        models=nn.Linear(1, 1), optimizer_configs=OptimizerConfig(), num_epochs=2, hooks=[DDPHook(), Note()],
        training_fn=lambda model, batch: model(batch[0]), loss_fn=lambda y, batch: y.square().mean(), progress=False,
    )  # fmt: skip
    strategy.run(DataLoader(TensorDataset(torch.arange(16.0)[:, None]), batch_size=4 // world(), shuffle=True))
    return seen


def main(folder):
    warnings.simplefilter("error", UserWarning)
    seen = {
        "one bad sample": trained(poisoned=True),
        "lazy": trained(poisoned=True, lazy=True),
        "sharded": trained(partial(FSDPHook, shard=["Linear"]), poisoned=True),
    }
    if world() < 4:
        seen |= {
            "all good": trained(),
            "without a scale": trained(poisoned=True, scaled=False),
            "lazy, without a scale": trained(poisoned=True, scaled=False, lazy=True),
            "validated": validated(),
            "epochs": epochs(),
        }
    if world() == 2:
        seen |= {
            "shared": shared(),
            "sent": {
                "eager": sent(),
                "lazy": sent(lazy=True),
                "accumulating": sent(GradientAccumulationHook(steps=2, on_nonfinite="drop"), SpikeSkipHook(warmup=2)),
            },
            "other hooks": other_hooks(),
            "other lengths": other_lengths(),
            "other batches": meeting(batch_count=4 + rank()),
            "other ends": meeting(is_last_batch=rank() == 1),
            "accumulated": (accumulated(), accumulated(static_graph=True)),
            "other ends of streams": other_ends_of_streams(),
            "other goals": other_goals(),
            "too few to validate": too_few_to_validate(),
            "early norm": early_norm(),
            "counted": counted(),
        }
        saved(folder)
    seen["loaded"] = loaded(folder, 2)
    torch.save(seen, folder / f"seen-{world()}-{rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
