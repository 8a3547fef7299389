"""Compiles every program for sm_90, which takes no GPU, and prints what the code is like as JSON.

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
from triton.compiler import ASTSource

from nvalchemi_hooks_triton.kernels import device
from nvalchemi_hooks_triton.kernels.onepass import block_sizes
from nvalchemi_hooks_triton.kernels.tables import CHUNK

KINDS = {
    **dict.fromkeys(("p", "m", "v", "e", "r", "g", "size"), "i64"),
    **dict.fromkeys(("steps", "tensors", "gradients"), "*i64"),
    **dict.fromkeys(("scalars", "divisor", "veto"), "*fp32"),
    **{"log_betas": "*fp64", "chunks": "*i32", "count": "i32", "place": "i32"},
}  # what is not here is a number, fp32
TOOL = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")


def code(name: str, *, num_warps: int = 4, num_stages: int = 1, **constants: Any) -> dict[str, Any]:
    """Compile one program with these constants."""
    program = getattr(device, name)
    kinds = {key: KINDS.get(key, "fp32") for key in program.arg_names} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        program, kinds, constexprs={(program.arg_names.index(key),): constants[key] for key in constants}
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    accesses = re.findall(r"\b(?:LD|ST)[GL]\S*", kernel.asm["sass"])
    return {
        "program": name,
        **{key: int(n) for key, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)},
        "accesses": accesses,
    }


def main() -> None:
    """Compile each program in the variants that differ in what they read and write."""
    found = [code("advance", LR_ON_DEVICE=False, HAS_VETO=True, BLOCK=128)]
    averages = ((False, False), (True, False), (True, True))
    names, dtypes = ("update_many", "update_one"), (torch.float32, torch.bfloat16)
    for name, dtype, (average, rounds) in itertools.product(names, dtypes, averages):
        switches = {"HAS_DIVISOR": True, "HAS_VETO": True, "MAXIMIZE": False, "DECOUPLED": True}
        switches |= {"AVERAGES": average, "ROUNDS": rounds, "KIND": device.KINDS[dtype], "CHUNK": CHUNK}
        key = {"dtype": str(dtype), "average": average, "rounds": rounds}
        found.append({**key, **code(name, **switches, **block_sizes(dtype))})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
