"""Train long, with all plugins, vetoes, infs, saves and loads at random, and see whether anything creeps.

    python tests/benchmarks/soak.py                  200,000 steps, some minutes
    python tests/benchmarks/soak.py --steps 20000    fewer
    python tests/benchmarks/soak.py --lazy           the host does not wait for the outcome of a step
    python tests/benchmarks/soak.py --json FILE      the figures for a program

The run is cut into blocks. Each ends with a load: into the same strategy, into a new one, or back to a state that was
saved at random inside the block, so that the same steps are counted anew. After each block everything that is counted
twice is compared: counters of strategy, scheduler, average, scaler, clipping and veto with those of a plain hook.

Memory is what the process holds after a block, and the number of tensors alive. Speed is the time that the training
thread had for a batch, the median over a block; other work on the machine counts little in it. A tenth of the run is
warm-up.

JSON: a list of {"row", "value", "target", "holds", "peer"}, as that of run.py; "peer" is empty.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from nvalchemi.training import (
    CheckpointHook,
    EMAHook,
    GradientClipHook,
    GradScalerVetoHook,
    LossScalingHook,
    OptimizerConfig,
    TrainingStage,
    TrainingStrategy,
    load_training,
    save_training,
)
from nvalchemi.training.hooks import TrainingUpdateHook

BLOCKS = 50
PASS = 250  # batches
GROWTH_INTERVAL, MIN_SCALE, MAX_SCALE = 50, 1.0, 2.0**20


class Veto(TrainingUpdateHook):
    """Vetoes the batches that say so, some at once and some on the device."""

    name = "veto"
    reads_grad = False
    defers_veto = True

    def before_optimizer_step(self, ctx: Any, *, will_skip: bool) -> bool:
        """Veto."""
        wanted = ctx.batch[2]
        if wanted == "device":
            ctx.defer_veto(torch.ones(()), "asked")
        return wanted != "host"


@dataclass
class Counts:
    """What is counted beside the run, by somebody who only looks on."""

    batches: int = 0
    steps: int = 0
    infs: int = 0
    windows: int = 0
    scale: float = 1024.0
    good: int = 0

    def add(self, ctx: Any, has_inf: bool) -> None:
        """Count a batch."""
        stepped = not has_inf and not ctx.batch[2]
        self.batches += 1
        self.windows += 1
        self.steps += stepped
        self.infs += has_inf
        if has_inf:
            self.scale, self.good = max(MIN_SCALE, self.scale / 2), 0
        elif stepped:
            self.good += 1
            if self.good == GROWTH_INTERVAL:
                self.scale, self.good = min(MAX_SCALE, self.scale * 2), 0


class Loader:
    """Passes over the same batches, in another order each time; some hold an inf, some ask for a veto."""

    def __init__(self, seed: int) -> None:
        drawn = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.batches = []
        for _ in range(PASS):
            x, y = torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)
            if drawn.random() < 0.02:
                y[0] = torch.inf
            veto = drawn.choices(["", "host", "device"], [0.96, 0.02, 0.02])[0]
            self.batches.append((x, y, veto))

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, str]]:
        return (self.batches[place] for place in torch.randperm(len(self.batches)).tolist())


class Onlooker:
    """A plain hook: counts, times every batch, and now and then takes the state."""

    frequency = 1
    stage = TrainingStage.AFTER_BATCH

    def __init__(self, drawn: random.Random) -> None:
        self.counts = Counts()
        self.times: list[float] = []
        self.taken: tuple[dict[str, Any], Counts] | None = None
        self.done = 0
        self._drawn, self._last = drawn, 0.0

    def __call__(self, ctx: Any, stage: TrainingStage) -> None:
        """Look on."""
        now = time.thread_time()
        self.times.append(now - self._last)
        has_inf = not bool(ctx.batch[1].isfinite().all())
        self.counts.add(ctx, has_inf)
        self.done += 1
        if self._drawn.random() < 0.002:
            self.taken = ctx.workflow.state_dict(), Counts(**vars(self.counts))
        self._last = time.thread_time()


@dataclass
class Block:
    """What was seen after a block."""

    way: str  # of the load that ended it
    resident: int  # bytes
    tensors: int
    seconds: float  # a batch, median


@dataclass
class Soak:
    """The whole run.

    Attributes
    ----------
    differences : list of str
        Where two ways of counting have come to different numbers.
    """

    blocks: list[Block] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    batches: int = 0
    saves: int = 0
    loads: int = 0


def make_strategy(folder: Path, looker: Onlooker, *, steps: int, lazy: bool) -> TrainingStrategy:
    """Return the run: every plugin that composes with the others."""
    torch.manual_seed(0)
    return TrainingStrategy(
        models=nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)),
        optimizer_configs=OptimizerConfig(
            optimizer_kwargs={"lr": 1e-3, "fused": True}, scheduler_cls="StepLR", scheduler_kwargs={"step_size": 1000}
        ),
        training_fn=lambda model, batch: model(batch[0]),
        loss_fn=lambda predictions, batch: (predictions - batch[1]).square().mean(),
        hooks=[
            EMAHook(decay=0.99),
            GradientClipHook(max_norm=0.5),
            LossScalingHook(
                init_scale=1024.0, growth_interval=GROWTH_INTERVAL, min_scale=MIN_SCALE, max_scale=MAX_SCALE
            ),
            GradScalerVetoHook(),
            CheckpointHook(root=folder / "kept", every_steps=1000, keep=2),
            Veto(),
            looker,
        ],
        num_steps=steps,
        progress=False,
        lazy=lazy,
    )


def soak(
    steps: int,
    *,
    lazy: bool = False,
    seed: int = 0,
    blocks: int = BLOCKS,
    on_block: Callable[[int], None] = lambda done: None,
) -> Soak:
    """Train so many steps and return what was seen."""
    result, drawn, loader = Soak(), random.Random(seed), Loader(seed)
    looker = Onlooker(drawn)
    in_a_block = max(1, steps // blocks)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def made() -> TrainingStrategy:
            return make_strategy(folder, looker, steps=in_a_block, lazy=lazy)

        strategy = made()
        done = 0
        while done < steps:
            before = strategy.step_count
            looker.times, looker.taken = [], None
            strategy.run(loader)
            done += strategy.step_count - before
            if not looker.times:  # the state that was loaded is that of the last batch of a block
                continue
            result.differences += [f"after {done} steps: {one}" for one in differences(strategy, looker.counts)]
            seconds = statistics.median(looker.times)
            way = drawn.choice(["same", "new", "disk", "back" if looker.taken else "new"])
            if way == "back" and looker.taken is not None:
                state, looker.counts = looker.taken
                strategy = made()
                strategy.load_state_dict(state)
                state = None
            elif way == "disk":
                save_training(folder / "own", strategy)
                strategy = made()
                load_training(folder / "own", strategy)
            else:
                state = strategy.state_dict()
                strategy = strategy if way == "same" else made()
                strategy.load_state_dict(state)
                state = None
            result.saves, result.loads = result.saves + 1, result.loads + 1
            looker.taken = None
            gc.collect()
            result.blocks.append(Block(way, resident(), tensors(), seconds))
            on_block(done)
    result.batches = looker.done
    return result


def differences(strategy: TrainingStrategy, counts: Counts) -> list[str]:
    """Return what two ways of counting disagree about."""
    ema, clip, scaling, veto = strategy.hooks[:4]
    scaler = scaling.scaler.state_dict()
    [scheduler] = strategy.lr_schedulers
    [optimizer] = strategy.optimizers
    moments = {int(state["step"]) for state in optimizer.state.values()}
    pairs = {
        "batch_count": (strategy.batch_count, counts.batches),
        "step_count": (strategy.step_count, counts.steps),
        "global_step_count": (strategy.global_step_count, counts.steps),
        "the scheduler": (scheduler.last_epoch, counts.steps),
        "the optimizer": (moments, {counts.steps}),
        "num_updates": (ema.num_updates, counts.steps),
        "n_averaged": (int(ema.get_averaged_model().n_averaged), counts.steps),
        "measured_steps": (clip.measured_steps, counts.windows),
        "total_skips": (veto.total_skips, counts.infs),
        "the scale": (scaler["scale"], counts.scale),
        "good steps since it grew": (scaler["growth_tracker"], counts.good),
    }
    return [f"{name} is {own}, and {other} were seen" for name, (own, other) in pairs.items() if own != other]


def resident() -> int:
    """Return the bytes of memory that the process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def tensors() -> int:
    """Return how many tensors are alive."""
    return sum(issubclass(type(one), Tensor) for one in gc.get_objects())


def figures(result: Soak) -> list[dict[str, Any]]:
    """Return the rows of a run, with their targets."""
    tenth = max(1, len(result.blocks) // 10)
    warm = result.blocks[tenth:]
    quarter = max(1, len(warm) // 4)
    first, last = warm[:quarter], warm[-quarter:]
    alive = {way: [block.tensors for block in warm if block.way == way] for way in {block.way for block in warm}}

    def ratio(value: Callable[[Block], float]) -> float:
        return statistics.median(map(value, last)) / statistics.median(map(value, first))

    values = {
        "differences between two ways of counting": (len(result.differences), 0),
        "tensors alive, more than at the start": (max(found[-1] - found[0] for found in alive.values()), 0),
        "memory, end against start": (ratio(lambda one: one.resident), 1.01),
        "time of a batch, end against start": (ratio(lambda one: one.seconds), 1.05),
    }
    return [
        {"row": row, "value": value, "target": target, "holds": value <= target, "peer": {}}
        for row, (value, target) in values.items()
    ]


def main() -> int:
    """Run from a shell; 1 if a row does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000, help="executed optimizer steps in all")
    parser.add_argument("--lazy", action="store_true", help="with a lazy orchestrator")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON, too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(stderr=True)
    with Progress(console=console) as progress:
        task = progress.add_task("training", total=given.steps)
        result = soak(
            given.steps,
            lazy=given.lazy,
            seed=given.seed,
            on_block=lambda done: progress.update(task, completed=done),
        )
    rows = figures(result)
    print(f"{result.batches} batches, {result.loads} loads, {len(result.blocks)} blocks")
    for row in rows:
        print(f"{row['row']}  {row['value']:.4g}  at most {row['target']:g}  {'holds' if row['holds'] else 'MISSED'}")
    for line in result.differences[:10]:
        print(line)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
