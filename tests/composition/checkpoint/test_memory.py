"""What loading costs in memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch
from torch import nn
from nvalchemi.training import OptimizerConfig, TrainingStrategy, load_training, save_training

def strategy(layers):
    return TrainingStrategy(
        models=nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(layers)]), optimizer_configs=OptimizerConfig(),
        loss_fn=lambda predictions, batch: predictions.square().mean(), num_steps=1, hooks=["ema"], progress=False)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

if sys.argv[1] == "save":
    run = strategy(8)
    run.run([torch.ones(1, 1024)])
    save_training(sys.argv[2], run)
else:
    strategy(1).setup()  # whatever torch needs the first time
    before = peak()
    load_training(sys.argv[2], strategy(8))
    print((peak() - before) * (1024 if sys.platform == "linux" else 1))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="the system does not tell the peak of a process")
def test_loading_needs_little_more_than_the_state(tmp_path):
    """Model, optimizer and average come into memory section by section: what is read is not kept."""
    for phase in ("save", "load"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, phase, str(tmp_path)], capture_output=True, text=True, check=True
        )
    size = sum(file.stat().st_size for file in tmp_path.rglob("*.pt"))
    assert size > 130e6
    assert int(done.stdout) < 1.6 * size
