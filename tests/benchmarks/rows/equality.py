"""All paths of an update, from the same weights through the same gradients: equal numbers, and who waits."""

from __future__ import annotations

import importlib.util
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvalchemi.testing import StepCost
from nvalchemi.training import TritonHook
from nvalchemi.training.hooks import OptimizerPlan
from rows.figures import Figure
from rows.pipelines import Naive, Ours, Update
from rows.targets import Target

__all__ = ["Build", "equality", "host_reads", "paths", "why_no_triton"]

Build = Callable[..., Update]
STEPS, POISONED = 8, (0, 4)
SHAPE = (6, 5000)  # tensors, elements
ROUNDING = 1e-6


def paths(device: torch.device) -> dict[str, Build]:
    """Return every way to do the same update on a device, the one that others are compared with first."""
    every: dict[str, Build] = {"folded": Ours, "lazy": partial(Ours, lazy=True), "plain": _plain, "naive": Naive}
    if not why_no_triton(device):
        every["triton"] = partial(Ours, more=_triton)
        every["triton, lazy"] = partial(Ours, more=_triton, lazy=True)
    return every


def why_no_triton(device: torch.device) -> str:
    """Return why the one-pass kernel cannot run; on a CPU it does in Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "TRITON_INTERPRET=1 is not set"
    return ""


def _triton() -> list[TritonHook]:
    return [TritonHook()]


def _plain(*sizes: int, **options: Any) -> Ours:
    """Return our hooks around an optimizer that somebody has hooked into, so that nothing is folded."""
    pipeline = Ours(*sizes, **options)
    pipeline.optimizer.register_step_pre_hook(lambda *arguments: None)
    return pipeline


def equality(device: torch.device) -> Iterator[Figure]:
    """Compare weights and averages after some steps, the first and a later one of them with an inf."""
    (name, build), *others = paths(device).items()
    for other, one in others:
        # AveragedModel takes a skipped step for a step, so with torch's own parts there is none.
        poisoned = () if one is Naive else POISONED
        pipeline = one(*SHAPE, device=device)
        pairs = zip(_trained(pipeline, poisoned), _trained(build(*SHAPE, device=device), poisoned), strict=True)
        differs = max(_difference(*pair) for pair in pairs)
        target = Target(f"{other} against {name}: largest relative difference after {STEPS} steps", ROUNDING)
        note = "bit for bit" if differs == 0 else ""
        yield Figure(target, differs, note=note, broken=_why_not_taken(pipeline) if "triton" in other else "")
    if why := why_no_triton(device):
        yield Figure(Target(f"triton against {name}", ROUNDING), None, note=why)


def _why_not_taken(pipeline: Update) -> str:
    """Return why the one-pass kernel leaves the steps to others, and is not what was compared; empty if it is."""
    assert isinstance(pipeline, Ours)
    (hook,) = (hook for hook in pipeline.hooks if isinstance(hook, TritonHook))
    pipeline.prepare()
    said = hook.update_executor().describe(OptimizerPlan(pipeline.optimizer, pipeline.weights))
    return said if said.startswith("left to others") else ""


def _trained(pipeline: Update, poisoned: tuple[int, ...]) -> list[Tensor]:
    """Return weights and averages after steps with ever larger gradients, some of them with an inf."""
    good = [gradient.clone() for gradient in pipeline.gradients]
    for step in range(STEPS):
        torch._foreach_copy_(pipeline.gradients, good)
        torch._foreach_mul_(pipeline.gradients, 1.0 + step)
        if step in poisoned:
            pipeline.gradients[1][7] = torch.inf
        pipeline.step()
    return [tensor.detach().double().cpu() for tensor in (*pipeline.weights, *pipeline.averages())]


def _difference(one: Tensor, other: Tensor) -> float:
    scale = other.abs().max()
    worst = (one - other).abs().max() / scale
    return float("inf") if worst.isnan() else float(worst)


def host_reads(device: torch.device) -> Iterator[Figure]:
    """Count how often the host waits for the device in a whole step, gradients included."""
    for name, build in paths(device).items():
        may_wait = not name.endswith("lazy")
        at_most = None if name in ("plain", "naive") else float(may_wait)
        pipeline = build(*SHAPE, device=device)
        for _ in range(4):
            pipeline.step()
        found = _waits(pipeline, may_wait) if device.type == "cuda" else _dispatched(pipeline)
        target = Target(f"host reads a step, {name}", at_most)
        yield Figure(target, float(len(found)), note="; ".join(sorted(set(found))))


def _waits(pipeline: Update, may_wait: bool) -> list[str]:
    """Return where torch says that the host waits; where it may not, the first wait is an error and ends the step."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn" if may_wait else "error")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pipeline.step()
    except RuntimeError as error:  # what torch raises then; anything else is said as well
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return [f"{error} ({Path(frame.filename).name}:{frame.lineno})"]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [f"{Path(one.filename).name}:{one.lineno}" for one in caught if "synchroniz" in str(one.message)]


def _dispatched(pipeline: Update) -> list[str]:
    with StepCost() as cost:
        pipeline.step()
    return [site.rpartition("/")[2] for site in cost.host_read_sites]
