"""Models whose parameters are spread over ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("ranks_of_shards.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two gloo ranks report of every check, by its name: [rank 0, rank 1]."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), "2", str(store)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        answers = [process.communicate(timeout=60) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], answers
    reports = [json.loads(out.splitlines()[-1]) for out, _ in answers]
    return {name: [report[name] for report in reports] for name in reports[0]}


def test_a_sharded_model_is_averaged_shard_by_shard(ranks):
    """The gathered average is that of one process, bit for bit, with odd lengths, buffers and tied weights."""
    for seen in ranks["copied_in_its_own_way"]:
        assert seen["equal"]
        assert seen["tied"]
        assert seen["local"]
        assert seen["eval"]


def test_an_update_and_a_state_need_no_communication(ranks):
    """Neither an update nor `state_dict` enters a collective: a rank averages, and keeps, what it holds."""
    for seen in ranks["copied_in_its_own_way"]:
        assert seen["collectives"] == 0
        assert seen["state is local"] == "DTensor"


def test_the_average_can_be_called(ranks):
    """The averaged model gathers itself when it is called, gives what one process gives, and then follows again."""
    for seen in ranks["copied_in_its_own_way"]:
        assert seen["called"]
        assert seen["called again after another update"]


def test_the_policy_of_precision_is_copied(ranks):
    """A model that FSDP2 computes in bfloat16 has an average that is computed in bfloat16."""
    assert [seen["out"] for seen in ranks["with_a_policy"]] == ["torch.bfloat16"] * 2


def test_shards_of_low_precision_have_accumulators(ranks):
    """bfloat16 shards are averaged in float32, as in one process, and the accumulators are shards, too."""
    assert ranks["with_low_precision"] == [{"equal": True, "accumulators": True}] * 2


def test_states_come_from_any_number_of_ranks(ranks):
    """A hook goes on from its own shards and from the whole state of one process, before and after the copy is made."""
    for seen in ranks["with_states"]:
        assert len(seen) == 4
        assert all(seen.values())


def test_shards_keep_to_a_veto(ranks):
    """Under a veto on the device no shard of the average moves."""
    assert ranks["under_a_veto"] == [{"held": True, "moved": True}] * 2


def test_a_copy_of_the_users_own(ranks):
    """A supplied sharded copy is averaged, also after it was called; one that is whole is refused by name."""
    for seen in ranks["supplied"]:
        assert seen["called"]
        assert "whole on every rank" in seen["refused"]
        assert "_build_averaged_model" in seen["refused"]
