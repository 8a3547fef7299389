"""A whole batch captured in a CUDA graph: the same numbers, no wait in a replay, and its time beside the lazy loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi.hooks import TrainContext
from nvalchemi.testing import RecordedGraph
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import CapturedUpdate, TrainingUpdateOrchestrator
from rows.equality import ROUNDING
from rows.figures import Figure
from rows.pipelines import four
from rows.targets import Target

__all__ = ["captured"]

BATCHES, TIMED, POISONED = 24, 50, (3, 11, 19)
STAGES = (TrainingStage.DO_BACKWARD, TrainingStage.DO_OPTIMIZER_STEP, TrainingStage.AFTER_OPTIMIZER_STEP)


class _Training:
    """A small network under all four plugins, lazy: launches are all that its batches cost."""

    def __init__(self, device: torch.device, *, capture: bool) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())]
        self.model, self.device = nn.Sequential(*layers).to(device), device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2.0**-10, fused=True)
        self.hooks = four()
        self.update = TrainingUpdateOrchestrator(*self.hooks, lazy=True)
        with TrainContext(models={"main": self.model}) as ctx:
            self.update(ctx, TrainingStage.SETUP)
        graph: dict[str, Any] = {} if device.type == "cuda" else {"graph": RecordedGraph}
        self.captured = CapturedUpdate(self.update, self._loss, **graph) if capture else None
        self.steps = 0

    def _loss(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()  # type: ignore[no-any-return]

    def step(self, x: Tensor) -> None:
        """Train on a batch."""
        with TrainContext(models={"main": self.model}, optimizers=[self.optimizer], step_count=self.steps) as ctx:
            if self.captured is not None:
                self.captured(ctx, x)
            else:
                self.update(ctx, TrainingStage.BEFORE_BATCH)
                ctx.loss = self._loss(x)
                for stage in STAGES:
                    self.update(ctx, stage)
        self.steps += 1

    def tensors(self) -> list[Tensor]:
        """Return weights and averages."""
        self.update.resolve()
        averages = self.hooks[3].get_averaged_model().module.parameters()
        return [tensor.detach().double().cpu() for tensor in (*self.model.parameters(), *averages)]


def captured(device: torch.device) -> Iterator[Figure]:
    """Compare, watch, and time."""
    loop, graph = _Training(device, capture=False), _Training(device, capture=True)
    for number in range(BATCHES):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(number)).to(device)
        x[0, 0] = torch.inf if number in POISONED else x[0, 0]
        loop.step(x)
        graph.step(x)
    pairs = zip(graph.tensors(), loop.tensors(), strict=True)
    differs = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
    row = f"captured against lazy: largest relative difference after {BATCHES} batches"
    assert graph.captured is not None
    broken = "" if graph.captured.replays > BATCHES // 2 else f"only {graph.captured.replays} were replayed"
    yield Figure(Target(row, ROUNDING), differs, note="bit for bit" if differs == 0 else "", broken=broken)
    found = _waits(device, graph, x)
    yield Figure(Target("host reads a replay", 0.0), float(len(found)), note="; ".join(found))
    times = {name: _milliseconds(device, one.step, x) for name, one in (("lazy", loop), ("captured", graph))}
    target = Target("a small batch captured, ratio to the lazy loop", None)
    yield Figure(target, times["captured"] / times["lazy"], note=f"lazy {times['lazy']:.3f} ms")


def _waits(device: torch.device, training: _Training, x: Tensor) -> list[str]:
    """Return what torch says of a wait in one replay, whose predecessor is over."""
    if device.type != "cuda":
        return []
    training.step(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        training.step(x)
    except RuntimeError as error:  # what torch raises then; anything else is said as well
        return [str(error)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return []


def _milliseconds(device: torch.device, step: Callable[[Tensor], None], x: Tensor) -> float:
    """Return the median time of a batch, the host's and the device's in one: the next waits for the one before."""
    took = []
    for _ in range(TIMED if device.type == "cuda" else 3):
        begin = time.perf_counter()
        step(x)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append(1e3 * (time.perf_counter() - begin))
    return median(took)
