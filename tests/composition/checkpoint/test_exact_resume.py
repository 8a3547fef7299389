"""n steps straight equal k steps, save, exit, load in a new process, n - k steps: for every hook that is installed."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nvalchemi.hooks import list_hooks

CASES = Path(__file__).with_name("cases.py")
TABLE = runpy.run_path(str(CASES))["table"]()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where both processes have left the end states of all cases."""
    folder = tmp_path_factory.mktemp("resume")
    for phase in ("before", "after"):
        done = subprocess.run([sys.executable, CASES, phase, folder], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return folder


def leaves(value, where=""):
    """Yield (place, value) of every leaf of a state."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{where}/{key}")
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from leaves(item, f"{where}/{place}")
    else:
        yield where, value


def equal(one, other):
    return torch.equal(one, other) and one.dtype == other.dtype if torch.is_tensor(one) else one == other


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_a_resumed_run_equals_a_straight_one(folder, case):
    """Weights, averages, optimizer, scheduler, scaler, counters, random numbers and place in the data, bit for bit."""
    for report in (folder / f"{case}.before.txt", folder / f"{case}.after.txt"):
        assert not report.exists(), report.read_text()
    straight, resumed = (
        dict(leaves(torch.load(folder / f"{case}.{end}.pt", weights_only=True))) for end in ("straight", "resumed")
    )
    assert set(straight) == set(resumed)
    assert [place for place, value in straight.items() if not equal(value, resumed[place])] == []
    assert straight["/run/counters/batch_count"] > max(10, straight["/run/counters/step_count"])


def test_the_table_holds_every_installed_hook(folder):
    """Each hook is there alone and in a stack, and the cases differ: hooks and precisions change the weights."""
    names = {hook.name for hook in list_hooks()}
    assert {case.hooks[0] for case in TABLE if len(case.hooks) == 1} == names
    assert {name for case in TABLE if len(case.hooks) > 1 for name in case.hooks} == names
    ends = {}
    for case in TABLE:
        if case.moment == "middle" and not case.compiled:
            state = torch.load(folder / f"{case}.straight.pt", weights_only=True)
            ends[case.hooks, case.precision] = tuple(state["models"]["main"]["0.weight"].flatten().tolist())
    assert len({ends[(), precision] for precision in ("fp32", "bf16", "fp16")}) == 3
    assert ends[("grad_clip",), "fp32"] != ends[(), "fp32"]
