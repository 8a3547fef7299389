"""Compiles every program for sm_90 as a launch would, which takes no GPU, and prints what the code is like as JSON.

A process of its own, because the tests have Triton's interpreter on, and what is interpreted cannot be compiled.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from nvalchemi_hooks_triton.kernels import Batch, Rule, Tables, onepass, update_

TOOL = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
RULE = Rule(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)


class Hopper:
    """Stands for the driver of a GPU that is not there."""

    def get_current_device(self) -> int:
        """Return its number."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the address of its stream."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Return what is compiled for."""
        return GPUTarget("cuda", 90, 32)


class Launches:
    """Compiles what is launched, and does not launch it."""

    def __init__(self) -> None:
        self.kernels: dict[str, Any] = {}
        real = JITFunction.run

        def run(program: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            self.kernels[program.__name__] = real(program, *args, grid=grid, warmup=True, **options)

        JITFunction.run = run


def code(kernel: Any) -> dict[str, Any]:
    """Return the registers, the bytes on the stack, and every access to memory of a compiled program."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    accesses = re.findall(r"\b(?:LD|ST)[GL]\S*", kernel.asm["sass"])
    return {**{key: int(n) for key, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}, "accesses": accesses}


def batch(dtype: torch.dtype, *, average: bool, rounds: bool) -> Batch:
    """Return something to update."""
    columns = [[torch.zeros(5000, dtype=dtype)] for _ in range(4)]
    averages = [torch.zeros(5000)] if average else None
    rounded = [torch.zeros(5000, dtype=dtype)] if rounds else None
    return Batch(*columns, steps=[torch.zeros(())], averages=averages, rounded=rounded, share=0.1)


def main() -> None:
    """Launch each program in the variants that differ in what they read and write."""
    driver.set_active(Hopper())
    launches, found = Launches(), []
    variants = ((False, False), (True, False), (True, True))
    operands = {"divisor": torch.tensor(2.0), "veto": torch.tensor(0.0)}
    for dtype, (average, rounds) in itertools.product((torch.float32, torch.bfloat16), variants):
        tables = Tables(torch.device("cpu"))
        for capturing in (False, True):
            onepass._capturing = lambda device, capturing=capturing: capturing
            update_(batch(dtype, average=average, rounds=rounds), RULE, tables, **operands)
        for name, kernel in launches.kernels.items():
            key = {"program": name, "dtype": str(dtype), "average": average, "rounds": rounds}
            found.append({**key, **code(kernel)})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
