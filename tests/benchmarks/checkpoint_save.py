"""How long training waits for a save, in units of one copy of its state.

    python tests/benchmarks/checkpoint_save.py [--parameters 20e6] [--repeat 7] [--root DIR]

Each round takes the same state, of a model and its AdamW after some steps, and measures by turns: one clone of every
tensor, ``torch.save`` of the state, the wait of a step in which `CheckpointHook` saves (asynchronous), and the time
until that checkpoint is complete.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from nvalchemi.hooks import TrainContext
from nvalchemi.training import OptimizerConfig, TrainingStage, TrainingStrategy
from nvalchemi_hooks_checkpoint import CheckpointHook

WIDTH = 1024
NAMES = ("one clone of the state", "torch.save of the state", "training waits for a save", "the save is complete after")


def trained(parameters: int) -> TrainingStrategy:
    """Return a run whose model has about so many parameters, and whose optimizer has stepped."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(max(1, round(parameters / (WIDTH * WIDTH + WIDTH))))]
    strategy = TrainingStrategy(
        models=nn.Sequential(*layers),
        optimizer_configs=OptimizerConfig(),
        loss_fn=lambda predictions, batch: predictions.square().mean(),
        num_steps=2,
        progress=False,
    )
    strategy.run([torch.randn(1, WIDTH)] * 2)
    return strategy


def state_tensors(strategy: TrainingStrategy) -> dict[str, list[torch.Tensor]]:
    """Return the tensors of models and optimizers, themselves and not copied."""
    weights = [tensor for model in strategy.models.values() for tensor in model.state_dict().values()]
    states = [state for optimizer in strategy.optimizers for state in optimizer.state.values()]
    moments = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return {"models": weights, "optimizers": moments}


def clone(tensors: dict[str, list[torch.Tensor]]) -> float:
    """Return the seconds of one copy of the state."""
    begin = time.perf_counter()
    copies = {part: [tensor.detach().clone() for tensor in group] for part, group in tensors.items()}
    seconds = time.perf_counter() - begin
    del copies
    return seconds


def save(tensors: dict[str, list[torch.Tensor]], folder: Path) -> float:
    """Return the seconds of torch.save of the state."""
    begin = time.perf_counter()
    torch.save(tensors, folder / "state.pt")
    return time.perf_counter() - begin


def wait(strategy: TrainingStrategy, hook: CheckpointHook, step: int) -> tuple[float, float]:
    """Return the seconds that training waits for a save, as that of `step`, and those until it is complete."""
    ctx = TrainContext(step_count=step, workflow=strategy)
    begin = time.perf_counter()
    hook(ctx, TrainingStage.AFTER_BATCH)
    waited = time.perf_counter() - begin
    hook.flush()
    return waited, time.perf_counter() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=20e6)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--root", type=Path, default=None, help="where to write; by default a temporary folder")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-save-", dir=options.root))
    strategy = trained(int(options.parameters))
    tensors = state_tensors(strategy)
    size = sum(tensor.nbytes for group in tensors.values() for tensor in group)
    rounds = []
    with CheckpointHook(root=folder / "checkpoints", every_steps=1, keep=1) as hook:
        for step in range(1, options.repeat + 2):
            rounds.append((clone(tensors), save(tensors, folder), *wait(strategy, hook, step)))
    shutil.rmtree(folder)
    columns = list(zip(*rounds[1:], strict=True))  # the first round warms up
    count = sum(tensor.numel() for tensor in tensors["models"])
    print(f"{count / 1e6:.1f}M parameters, a state of {size / 1e6:.0f} MB, {torch.get_num_threads()} thread(s)")
    print(f"{options.repeat} rounds; the ratio is that to one clone, of the best rounds{'':3}median      best   ratio")
    for name, column in zip(NAMES, columns, strict=True):
        ratio = min(column) / min(columns[0])
        print(f"{name:60}{statistics.median(column) * 1e3:6.0f} ms {min(column) * 1e3:6.0f} ms {ratio:5.2f} x")


if __name__ == "__main__":
    main()
