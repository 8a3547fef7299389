"""Exact counts: they hold on any machine, and are tests as well (tests/composition/test_cost.py)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvalchemi.testing import StepCost
from rows.figures import Figure
from rows.pipelines import Naive, Ours, Update
from rows.targets import TARGETS

__all__ = ["counts"]

COMPILER = Path(__file__).parents[2] / "plugins" / "triton" / "compile_for_hopper.py"
Build = Callable[..., Update]


def counts() -> Iterator[Figure]:
    """Count everything."""
    naive = {name: cost(build, 300) for name, build in _NAIVE.items()}
    for mode in ("eager", "lazy"):
        few, many = (cost(Ours, tensors, lazy=mode == "lazy") for tensors in (8, 300))
        reads = {"naive fused": float(naive["naive fused"].host_reads)}  # foreach reads its own counters on a CPU
        note = "" if mode == "lazy" else "a CPU reads its own memory without an operation; a device is asked once"
        yield Figure(TARGETS[f"reads {mode}"], max(few.host_reads, many.host_reads), peers=reads, note=note)
        grows = "" if few.ops_by_name == many.ops_by_name else f"{few.ops} for 8 tensors, {many.ops} for 300"
        ops = {name: float(one.ops) for name, one in naive.items()}
        yield Figure(TARGETS[f"ops {mode}"], many.ops, peers=ops, broken=grows)
    ours, by_name = bytes_each(Ours)
    lazy, _ = bytes_each(Ours, lazy=True)
    peers = {name: bytes_each(build)[0] for name, build in _NAIVE.items()}
    yield Figure(TARGETS["bytes"], ours, peers=peers, broken="" if ours == lazy else f"lazy {lazy:g}")
    yield _one_pass(norm=sum(size for name, size in by_name.items() if "norm" in name), peers=peers)
    yield _skipped()


def cost(build: Build, tensors: int, elements: int = 4, **options: Any) -> StepCost:
    """Return the cost of one update, after three others."""
    pipeline = build(tensors, elements, **options)
    for _ in range(3):
        pipeline.step()
    pipeline.prepare()
    with StepCost() as found:
        pipeline.update()
    return found


def bytes_each(build: Build, **options: Any) -> tuple[float, dict[str, float]]:
    """Return the bytes that each further parameter costs, and the same by operation."""
    small, large = (cost(build, 4, elements, **options) for elements in (10_000, 20_000))
    further = 4 * 10_000
    names = large.bytes_by_name
    by_name = {name: (names[name] - small.bytes_by_name[name]) / further for name in names}
    return (large.bytes - small.bytes) / further, by_name


def _naive_foreach(*sizes: int) -> Naive:
    return Naive(*sizes, fused=False)


_NAIVE: dict[str, Build] = {"naive fused": Naive, "naive foreach": _naive_foreach}


# One variant of the program, the one that steps float32 weights and averages them along.
_COMPILE = """
import json, runpy, torch
from triton.runtime.driver import driver
tools = runpy.run_path({compiler!r})
driver.set_active(tools["Hopper"]())
launches, one = tools["Launches"](), tools["batch"](torch.float32, average=True, rounds=False)
operands = dict(divisor=torch.tensor(2.0), veto=torch.tensor(0.0))
tools["update_"](one, tools["RULE"], tools["Tables"](torch.device("cpu")), **operands)
print(json.dumps(tools["code"](launches.kernels["update_many"])["accesses"]))
"""


def _one_pass(*, norm: float, peers: dict[str, float | None]) -> Figure:
    """Count the kernel's bytes in its machine code for Hopper, compiled without a GPU; the norm comes before it."""
    target = TARGETS["bytes triton"]
    if importlib.util.find_spec("triton") is None:
        return Figure(target, None, note="triton is not installed")
    code = _COMPILE.format(compiler=str(COMPILER))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        return Figure(target, None, note=f"compiling failed: {done.stderr.strip().splitlines()[-1]}")
    wide = [access for access in json.loads(done.stdout) if access.endswith(".128")]  # of 16 bytes, for four weights
    return Figure(target, norm + 16 * len(wide) / 4, peers=peers, note="in its code for sm_90, not run")


def _skipped() -> Figure:
    """Count the tensors that differ after a skipped step, the first and a later one, of every kind of optimizer."""
    ours = sum(changed(Ours, kind, lazy=lazy) for kind in _KINDS for lazy in (False, True))
    return Figure(TARGETS["skipped"], ours, peers={"naive": float(sum(changed(Naive, kind) for kind in _KINDS))})


_KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda weights: torch.optim.AdamW(weights),
    "AdamW, fused": lambda weights: torch.optim.AdamW(weights, fused=True),
    "SGD with momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "SGD with momentum, fused": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=True),
}


def changed(build: Build, kind: str, **options: Any) -> int:
    """Return how many tensors two skipped steps change: the first of all, and one after three good ones."""
    pipeline = build(4, 8, **options)
    pipeline.optimizer = _KINDS[kind](pipeline.weights)
    differ = _changed_by_inf(pipeline)
    for _ in range(3):
        pipeline.step()
    return differ + _changed_by_inf(pipeline)


def _changed_by_inf(pipeline: Update) -> int:
    good = [gradient.clone() for gradient in pipeline.gradients]
    before = _bits(pipeline)
    pipeline.gradients[1][0] = torch.inf
    pipeline.step()
    after = _bits(pipeline)
    torch._foreach_copy_(pipeline.gradients, good)
    return sum(bits != before.get(name, bytes(len(bits))) for name, bits in after.items())  # what is new may be zero


def _bits(pipeline: Update) -> dict[str, bytes]:
    """Return the bits of weights, moments, counters and averages."""
    named = {f"weight {n}": weight for n, weight in enumerate(pipeline.weights)}
    named |= {f"average {n}": average for n, average in enumerate(pipeline.averages())}
    for n, parameter in enumerate(pipeline.weights):
        state = pipeline.optimizer.state.get(parameter, {})
        named |= {f"{key} {n}": value for key, value in state.items() if isinstance(value, Tensor)}
    return {name: tensor.detach().numpy().tobytes() for name, tensor in named.items()}
