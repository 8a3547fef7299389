"""The table of exact resumption, computed from what is installed, and one run for each of its lines.

Run by path as ``python cases.py PHASE FOLDER`` it goes through the whole table in one process: ``before`` trains
straight and up to the stop, ``after`` loads and goes on. Both write the end state of each case to a file.
"""

from __future__ import annotations

import random
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nvalchemi.hooks import activate_hooks, list_hooks
from nvalchemi.training import OptimizerConfig, TrainingStage, TrainingStrategy, load_training, save_training
from nvalchemi.training.hooks import TrainingUpdateHook

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
MOMENTS = {"first": 0, "middle": 9, "vetoed": 8}  # so many batches are behind; each pass has six, a window two or one
STEPS = 13
COMPILED = "compiled"

# Arguments under which a hook's state matters within a few steps; a hook that is not here is made without arguments.
ARGUMENTS = {
    "checkpoint": lambda case, folder: {"root": str(folder / f"{case}-own"), "every_steps": 5},
    "ema": lambda case, folder: {"decay": 0.9, "update_every": 2},
    "grad_accum": lambda case, folder: {"steps": 2},
    "grad_clip": lambda case, folder: {"max_norm": 0.05},
    "loss_scaling": lambda case, folder: {"growth_interval": 2, "init_scale": 1024.0},
    "mixed_precision": lambda case, folder: {"precision": case.precision, **SCALING.get(case.precision, {})},
}
# What in a hook's state says which run it is, not how far it is: equal runs differ there.
RUN_MARKS = {"checkpoint": ("folder",)}
SCALING = {"fp16": {"growth_interval": 2, "init_scale": 1024.0}}


class Case(NamedTuple):
    """One line of the table."""

    hooks: tuple[str, ...]
    precision: str
    moment: str
    compiled: bool = False

    def __str__(self) -> str:
        model = f"-{COMPILED}" if self.compiled else ""
        return f"{'+'.join(self.hooks) or 'none'}-{self.precision}-{self.moment}{model}"


class VetoAt(TrainingUpdateHook):
    """Vetoes one batch."""

    name = "veto_at"

    def before_optimizer_step(self, ctx, *, will_skip):
        """Veto the batch before the moment "vetoed"."""
        return ctx.batch_count != MOMENTS["vetoed"] - 1


class Jitter(TrainingUpdateHook):
    """Draws from the generators of python and numpy, so that the run depends on them."""

    name = "jitter"
    reads_grad = False

    def transform_loss(self, ctx, loss):
        """Change the loss a little."""
        return loss * (1 + 0.1 * (random.random() + float(numpy.random.random())))


class Stop(Exception):
    """The run has been saved."""


class SaveAt:
    """Saves after so many batches, and stops the run there."""

    frequency = 1
    stage = TrainingStage.AFTER_BATCH

    def __init__(self, batches, root):
        self.batches, self.root = batches, root

    def __call__(self, ctx, stage):
        """Save and stop."""
        if ctx.batch_count == self.batches:
            save_training(self.root, ctx.workflow)
            raise Stop


def table() -> list[Case]:
    """Return every hook alone and every stack, in each precision, stopped at each moment; one stack compiled."""
    names = sorted({hook.name for hook in list_hooks()})
    groups = [(), *((name,) for name in names), *_stacks(names)]
    cases = [Case(group, precision, moment) for group in groups for precision in PRECISIONS for moment in MOMENTS]
    return [*cases, Case(groups[-1], "fp32", "middle", compiled=True)]


def _stacks(names: list[str]) -> list[tuple[str, ...]]:
    """Return the largest sets of hooks that can be composed: one for each member of an exclusive family."""
    families: dict[str, list[str]] = {}
    free = []
    for name in names:
        [activated] = activate_hooks([_configured(name, Case((name,), "fp32", "first"), Path("unused"))])
        family = getattr(activated.hook, "exclusive_family", None)
        families.setdefault(family, []).append(name) if family else free.append(name)
    stacks = [tuple(free)]
    for members in families.values():
        stacks = [(*stack, member) for stack in stacks for member in members]
    return stacks


def _configured(name: str, case: Case, folder: Path) -> object:
    return {name: ARGUMENTS[name](case, folder)} if name in ARGUMENTS else name


def make_strategy(case: Case, folder: Path, *more: object) -> TrainingStrategy:
    """Return the run of a case; the same at each call."""
    _seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.25), nn.BatchNorm1d(8), nn.Linear(8, 1))
    own = "mixed_precision" in case.hooks  # it opens autocast by itself
    dtype = None if own else PRECISIONS[case.precision]

    def predict(model, batch):
        with torch.autocast("cpu", dtype) if dtype else nullcontext():
            return model(batch[0])

    return TrainingStrategy(
        models=torch.compile(model) if case.compiled else model,
        optimizer_configs=OptimizerConfig(
            optimizer_kwargs={"lr": 0.02}, scheduler_cls="StepLR", scheduler_kwargs={"step_size": 4, "gamma": 0.5}
        ),
        training_fn=predict,
        loss_fn=lambda predictions, batch: (predictions.float() - batch[1]).square().mean(),
        num_steps=STEPS,
        hooks=[*(_configured(name, case, folder) for name in case.hooks), VetoAt(), Jitter(), *more],
        progress=False,
    )


def make_loader() -> DataLoader:
    """Return a shuffling loader of six batches."""
    x = torch.linspace(-1, 1, 288).reshape(48, 6).sin()
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).cos()), batch_size=8, shuffle=True)


def before(case: Case, folder: Path) -> None:
    """Train straight, and in a second run up to the stop."""
    straight = make_strategy(case, folder / "straight", SaveAt(-1, folder))
    straight.run(make_loader())
    torch.save(_end_of(straight), folder / f"{case}.straight.pt")
    stopped = make_strategy(case, folder / "stopped", SaveAt(MOMENTS[case.moment], folder / str(case)))
    if case.moment == "first":
        save_training(folder / str(case), stopped)
        return
    try:
        stopped.run(make_loader())
    except Stop:
        return
    raise AssertionError("the run was never stopped")


def after(case: Case, folder: Path) -> None:
    """Load, and train to the end."""
    resumed = make_strategy(case, folder / "stopped", SaveAt(-1, folder))
    _seed(99)
    load_training(folder / str(case), resumed)
    resumed.run(make_loader())
    torch.save(_end_of(resumed), folder / f"{case}.resumed.pt")


def _end_of(strategy: TrainingStrategy) -> dict:
    state = strategy.state_dict()
    for hook in state["hooks"].values():
        for mark in RUN_MARKS.get(hook["name"], ()):
            del hook["state"][mark]
    return state


def _seed(number: int) -> None:
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def _run(phase: str, folder: Path) -> None:
    act = {"before": before, "after": after}[phase]
    for case in table():
        try:
            act(case, folder)
        except Exception:  # the other cases are still worth knowing; the test of this one shows what was raised
            (folder / f"{case}.{phase}.txt").write_text(traceback.format_exc())


if __name__ == "__main__":
    torch.set_num_threads(1)
    _run(sys.argv[1], Path(sys.argv[2]))
