"""The main example stopped, gone on with, and exported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "molecules" / "train.py"


@pytest.fixture
def start(tmp_path):
    """Start the example in a process of its own, in an empty folder."""

    def start(*arguments):
        command = [sys.executable, str(SCRIPT), *arguments]
        environment = {**os.environ, "PYTHONSAFEPATH": ""}
        return subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return start


@pytest.fixture
def run(start):
    """Run the example to its end; gives what it printed."""

    def run(*arguments):
        process = start(*arguments)
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
        return " ".join(out.split())

    return run


def test_a_run_that_was_stopped_exports_the_bytes_of_one_that_was_not(run, tmp_path):
    """60 steps straight, and 30 steps and then 60 with --resume, give equal files with live and averaged weights."""
    run("--steps", "60", "--export", "straight.pt")
    run("--steps", "30", "--checkpoint", "run")
    printed = run("--steps", "60", "--checkpoint", "run", "--resume", "--export", "resumed.pt")
    assert "going on from run/step-00000030, after 30 steps" in printed
    assert "60 steps taken" in printed
    assert (tmp_path / "straight.pt").read_bytes() == (tmp_path / "resumed.pt").read_bytes()
    weights = torch.load(tmp_path / "resumed.pt", weights_only=True)
    assert set(weights) == {"live", "averaged"}
    assert not all(torch.equal(weights["live"][name], weights["averaged"][name]) for name in weights["live"])


def test_a_run_that_was_killed_goes_on(start, run, tmp_path):
    """Killed in its second epoch, it goes on after the first: figures and weights of a run that was never stopped."""
    run("--steps", "120", "--export", "straight.pt", "--json", "straight.json")
    process = start("--steps", "120", "--checkpoint", "run")
    while not (tmp_path / "run" / "step-00000096" / "manifest.json").exists():
        assert process.poll() is None, "it was over before it could be killed"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = ("--steps", "120", "--checkpoint", "run", "--resume")
    assert "going on from run/step-" in run(*again, "--export", "resumed.pt", "--json", "resumed.json")
    assert (tmp_path / "straight.pt").read_bytes() == (tmp_path / "resumed.pt").read_bytes()
    straight, resumed = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("straight", "resumed"))
    assert {**straight, "seconds": 0} == {**resumed, "seconds": 0}
