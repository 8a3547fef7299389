"""What several ranks agree on."""

from __future__ import annotations

import multiprocessing
import runpy
from pathlib import Path

import pytest
import torch
from torch import distributed

SCRIPT = str(Path(__file__).with_name("two_ranks.py"))


@pytest.fixture
def ranks(tmp_path):
    """What two processes came to, in which the first alone met a spike."""
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=runpy.run_path, args=(SCRIPT, {"rank": rank, "folder": tmp_path}, "__main__"))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0]
    return [torch.load(tmp_path / f"rank{rank}", weights_only=True) for rank in range(2)]


@pytest.mark.skipif(not distributed.is_available(), reason="this build of torch has no torch.distributed")
def test_all_ranks_skip_the_same_steps_and_know_the_same(ranks):
    """A spike on one of two ranks is skipped by both, by their mean loss, and both end in the same state."""
    first, second = ranks
    assert first == second
    assert first["skipped"] == [batch == 10 for batch in range(12)]
    assert first["state"]["skips"][0][4] == pytest.approx((50.0 + 2.1) / 2)
