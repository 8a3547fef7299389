"""What several ranks agree on."""

from __future__ import annotations

import multiprocessing
import runpy
from pathlib import Path

import pytest
import torch
from torch import distributed

SCRIPT = str(Path(__file__).with_name("two_ranks.py"))


@pytest.mark.skipif(not distributed.is_available(), reason="this build of torch has no torch.distributed")
def test_every_rank_skips_and_stops_or_none_does(tmp_path):
    """An inf on one of two ranks makes both skip the same steps, and stop after the same batch."""
    spawn = multiprocessing.get_context("spawn")
    ranks = [
        spawn.Process(target=runpy.run_path, args=(SCRIPT, {"rank": rank, "folder": tmp_path}, "__main__"))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(180)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    first, second = (torch.load(tmp_path / f"rank{rank}", weights_only=True) for rank in range(2))
    assert first["skipped"] == second["skipped"] == [False, True, False, True, True]
    assert first["weight"] == second["weight"] == -2.0
    assert "'w'" in first["error"]
    assert "on this rank no parameter" in second["error"]
