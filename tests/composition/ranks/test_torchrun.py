"""Programs that torchrun starts: a rank that fails ends all, and the molecules example trains on two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ase")  # of the molecules
EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "molecules" / "train.py"


def torchrun(program, *arguments, folder, seconds=60):
    """Start two ranks, and wait for them for so many seconds at most."""
    ranks = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", str(program)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*ranks, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds
    )


def test_a_rank_that_fails_ends_the_run_with_its_own_message(tmp_path):
    """The other rank waits for it in vain, and yet the run is over within a minute, with what went wrong."""
    done = torchrun(Path(__file__).with_name("failing.py"), folder=tmp_path)
    assert done.returncode != 0
    assert "ValueError: the third batch of rank 1 is spoilt" in done.stderr


def test_the_molecules_train_on_two_ranks(tmp_path):
    """The example runs under torchrun as it stands; one rank prints, saves and writes, and a run can be resumed."""
    asked = ["--json", "figures.json", "--plot", "picture.png"]
    straight = torchrun(EXAMPLE, "--steps", "8", *asked, folder=tmp_path, seconds=120)
    assert straight.returncode == 0, straight.stderr
    expected = json.loads((tmp_path / "figures.json").read_text())
    assert straight.stdout.count("mean absolute errors on held-out configurations") == 1
    assert "hooks: ddp, mixed_precision" in straight.stdout
    for more in (["--steps", "5"], ["--steps", "8", "--resume"]):
        done = torchrun(EXAMPLE, *more, *asked, "--checkpoint", "run", folder=tmp_path, seconds=120)
        assert done.returncode == 0, done.stderr
    resumed = json.loads((tmp_path / "figures.json").read_text())
    assert {**resumed, "seconds": 0} == {**expected, "seconds": 0}
