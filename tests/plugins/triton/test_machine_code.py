"""The code for Hopper (sm_90), compiled without a GPU: registers, spills, and how wide it reads and writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> list[dict]:
    """What became of each program."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = {**kept, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}  # compiled now, not last week
    script = Path(__file__).with_name("compile_for_hopper.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_registers_suffice(compiled):
    """At most 64 registers a thread, so that 1,024 threads fit on a multiprocessor, and none is spilled to memory."""
    assert {code["program"] for code in compiled} == {"advance", "update_many", "update_one"}
    for code in compiled:
        assert 0 < code["REG"] <= 64, code
        assert code["STACK"] == code["LOCAL"] == 0, code
        assert not [access for access in code["accesses"] if access.startswith(("LDL", "STL"))], code


# The norm, which is measured before, reads the gradients once more: 4 and 2 bytes beside these.
BYTES = {
    ("torch.float32", False, False): 28,
    ("torch.float32", True, False): 36,
    ("torch.float32", True, True): 40,
    ("torch.bfloat16", False, False): 14,
    ("torch.bfloat16", True, False): 22,
    ("torch.bfloat16", True, True): 24,
}


@pytest.mark.parametrize("program", ["update_many", "update_one"])
@pytest.mark.parametrize("variant", BYTES, ids=str)
def test_aligned_weights_move_in_16_bytes_and_no_byte_too_many(compiled, program, variant):
    """A thread's weights fill 16 bytes, and its accesses of that width are just the bytes that the update needs."""
    (code,) = (
        one
        for one in compiled
        if one["program"] == program and (one["dtype"], one["average"], one["rounds"]) == variant
    )
    wide = [access for access in code["accesses"] if access.endswith(".128")]
    weights = 16 // (4 if variant[0] == "torch.float32" else 2)
    assert 16 * len(wide) / weights == BYTES[variant]
