"""All generators come back, and looking at them draws nothing."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy
import pytest
import torch

from nvalchemi.training.plain import check_plain
from nvalchemi.training.rng import capture_rng, restore_rng


def draw():
    return [random.random(), random.gauss(), numpy.random.random(), numpy.random.normal(), float(torch.rand(()))]


@pytest.mark.parametrize("gauss_pending", [False, True])
def test_what_is_drawn_after_restoring_is_what_was_drawn_after_capturing(gauss_pending):
    """python, numpy and torch, with a second gaussian number of python and numpy waiting or not."""
    if gauss_pending:
        draw()
    state = capture_rng()
    check_plain(state, "rng")
    first = draw()
    draw()
    restore_rng(state)
    assert draw() == first


def test_capturing_draws_nothing():
    """Capturing twice gives the same numbers as capturing once."""
    state = capture_rng()
    expected = draw()
    restore_rng(state)
    capture_rng()
    assert draw() == expected


def test_states_of_devices_that_are_not_there_are_passed_over(monkeypatch):
    """A checkpoint from a machine with GPUs loads on one without."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    restore_rng({**capture_rng(), "cuda": [torch.zeros(16, dtype=torch.uint8)]})


def test_cuda_is_not_initialised_by_looking():
    """A process that does not use CUDA does not begin to."""
    code = "import torch; from nvalchemi.training.rng import capture_rng; s = capture_rng(); "
    code += "assert 'cuda' not in s and not torch.cuda.is_initialized()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_generators_of_cuda_devices_come_back():
    """Every CUDA device draws what it drew."""
    torch.rand(1, device="cuda")
    state = capture_rng()
    first = torch.rand(3, device="cuda")
    restore_rng(state)
    assert torch.equal(torch.rand(3, device="cuda"), first)
