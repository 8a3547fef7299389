"""All generators come back, and looking at them draws nothing."""

from __future__ import annotations

import io
import random
import subprocess
import sys

import numpy
import pytest
import torch

from nvalchemi.errors import CheckpointMismatchError
from nvalchemi.training.plain import check_plain
from nvalchemi.training.rng import capture_rng, check_rng, restore_rng


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


@pytest.fixture(params=["PCG64", "PCG64DXSM", "Philox", "SFC64"])
def bit_generator(request):
    """Another generator below ``numpy.random``, and the one that was there afterwards."""
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(getattr(numpy.random, request.param)(1))
    yield request.param
    numpy.random.set_bit_generator(before)


def test_numpy_may_draw_from_any_of_its_generators(bit_generator):
    """Whatever numpy.random draws from comes back, out of a file that is loaded safely too."""
    draw()
    file = io.BytesIO()
    check_plain(state := capture_rng(), "rng")
    torch.save(state, file)
    first = draw()
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    check_rng(loaded, "rng")
    restore_rng(loaded)
    assert draw() == first


def test_numpy_drawing_from_another_generator_is_named(bit_generator):
    """A state of another generator than the one in use is refused with both names and how to set it."""
    state = capture_rng()
    numpy.random.set_bit_generator(numpy.random.MT19937(1))
    message = rf"rng holds .*of numpy .*draws from MT19937 here, but drew from {bit_generator}: .*set_bit_generator"
    with pytest.raises(CheckpointMismatchError, match=message):
        check_rng(state, "rng")


BROKEN = {
    "python": [3, torch.zeros(5, dtype=torch.int64), None],
    "torch": torch.zeros(3, dtype=torch.uint8),
    "numpy": {"bit_generator": "MT19937", "state": {}},
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_state_is_refused_and_changes_nothing(name):
    """Checking tries the state on other generators: it names what does not fit, and the next numbers are the same."""
    state = capture_rng()
    first = draw()
    restore_rng(state)
    with pytest.raises(
        CheckpointMismatchError, match=f"rng holds no state that the random numbers of {name} can go on"
    ):
        check_rng({**state, name: BROKEN[name]}, "rng")
    check_rng(state, "rng")
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
