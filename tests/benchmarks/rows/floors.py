"""The time of an update beside that of moving its bytes, at the rate at which the device copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nvalchemi.hooks import TrainContext
from nvalchemi.training import EMAHook
from rows.equality import Build, paths
from rows.figures import Figure
from rows.pipelines import DECAY, Naive, Update
from rows.targets import TARGETS, Target

__all__ = ["BYTES", "copy_rate", "floor", "floors"]

BYTES = {"naive": 60, "naive, foreach": 112, "folded": 48, "lazy": 48, "triton": 40, "triton, lazy": 40, "EMA": 12}
"""What each moves for a parameter in float32; the counts of run.py."""
TENSORS = {"cuda": 200, "cpu": 4}
REPEAT = {"cuda": 20, "cpu": 2}
H200 = {"folded": "h200 stock", "lazy": "h200 stock", "triton": "h200 triton", "triton, lazy": "h200 triton"}
H200 |= {"EMA": "h200 ema"}
NEEDED = 40  # bytes a parameter on the device at once: weights, two sets of gradients and what they are from, state


def floor(name: str, parameters: int, rate: float) -> float:
    """Return the milliseconds that moving the bytes of an update takes at `rate`, in bytes a second."""
    return 1e3 * BYTES[name] * parameters / rate


def copy_rate(device: torch.device, size: int) -> float:
    """Return the bytes a second, read and written, of copying `size` bytes."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / (1e-3 * _milliseconds(device, lambda: None, lambda: target.copy_(source), 10))


def floors(device: torch.device, sizes: list[int], rate: float) -> Iterator[Figure]:
    """Time every way to do an update, at every size that fits."""
    builds = {name: build for name, build in paths(device).items() if name != "plain"}
    builds |= {"naive, foreach": _foreach, "EMA": _Average}
    for parameters in sizes:
        for name, build in builds.items():
            yield _timed(name, build, device, parameters, rate)


def _timed(name: str, build: Build, device: torch.device, parameters: int, rate: float) -> Figure:
    target = _target(name, device, parameters)
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < NEEDED * parameters:
        return Figure(target, None, note=f"{NEEDED * parameters / 1e9:.0f} GB are needed")
    tensors = TENSORS[device.type]
    pipeline = build(tensors, parameters // tensors, device=device)
    for _ in range(3):
        pipeline.step()
    took = _milliseconds(device, pipeline.prepare, pipeline.update, REPEAT[device.type])
    least = floor(name, parameters, rate)
    del pipeline
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Figure(target, took, peers={"floor": least}, note=f"{took / least:.2f} x floor")


def _target(name: str, device: torch.device, parameters: int) -> Target:
    is_h200 = device.type == "cuda" and "H200" in torch.cuda.get_device_name(device)
    row = f"{parameters:,} parameters, {name}"
    known = TARGETS[H200[name]].at_most if is_h200 and parameters == 100_000_000 and name in H200 else None
    return Target(row, known, unit="ms")


def _milliseconds(device: torch.device, prepare: Callable[[], Any], work: Callable[[], Any], repeat: int) -> float:
    """Return the median time from before to after `work` on the device; the host may be ahead of it."""
    clock = _on_cuda if device.type == "cuda" else _on_host
    return statistics.median(clock(prepare, work) for _ in range(repeat))


def _on_cuda(prepare: Callable[[], Any], work: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    prepare()
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _on_host(prepare: Callable[[], Any], work: Callable[[], Any]) -> float:
    prepare()
    begin = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - begin)


def _foreach(*sizes: int, **options: Any) -> Update:
    return Naive(*sizes, fused=False, **options)


class _Average(Update):
    """The average alone."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.gradients = []
        self.hook = EMAHook(decay=DECAY)
        self.ctx = TrainContext(models={"main": self.model})
        self.hook.setup(self.ctx)

    def prepare(self) -> None:
        """Nothing is needed."""

    def update(self) -> None:
        """Follow the weights."""
        self.hook.after_optimizer_step(self.ctx, skipped=False)
