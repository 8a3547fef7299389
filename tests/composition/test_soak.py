"""A short soak: what is exact in the long one."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[1] / "benchmarks" / "soak.py"


@pytest.fixture(scope="module")
def tools():
    """What the script defines."""
    return runpy.run_path(str(SOAK))


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_two_ways_of_counting_agree_and_no_tensor_stays(tools, lazy):
    """Over blocks of steps with vetoes, infs, saves and loads every count is exact, and no tensor is left over."""
    result = tools["soak"](2000, lazy=lazy, blocks=16)
    assert result.loads == len(result.blocks) >= 16
    assert result.batches > 2000  # some were vetoed, and some were trained on twice
    rows = {row["row"]: row["value"] for row in tools["figures"](result)}
    assert result.differences == []
    assert rows["tensors alive, more than at the start"] == 0, result.blocks


def test_a_count_that_drifts_is_told(tools, monkeypatch):
    """An average that counts one update too many is a difference after every block."""
    from nvalchemi.training import EMAHook

    real = EMAHook.settled

    def settled(self, ctx, *, skipped):
        real(self, ctx, skipped=skipped)
        self.num_updates += ctx.step_count == 7

    monkeypatch.setattr(EMAHook, "settled", settled)
    assert any("num_updates" in line for line in tools["soak"](100, blocks=4).differences)
