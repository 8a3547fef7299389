"""Models spread over ranks by FSDP2, with everything on: the numbers, the checkpoints, and what goes wrong."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch

from nvalchemi.errors import CheckpointDamagedError, CheckpointMissingError
from nvalchemi.training import load_checkpoint, load_training
from nvalchemi.training.checkpoint.manifest import read_manifest


def furthest(found, expected):
    """The largest difference between two runs, and where it is."""
    assert found.keys() == expected.keys()
    distances = {
        name: (value.double() - expected[name].double()).abs().max().item()
        for name, value in found.items()
        if torch.is_tensor(value)
    }
    return max((distance, name) for name, distance in distances.items())


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in other if torch.is_tensor(other[name]))


@pytest.fixture(scope="module")
def expected(alone, folder):
    return alone.trained(folder)


@pytest.mark.parametrize("ranks", ["two", "four"])
def test_fifty_steps_are_those_of_one_process(request, expected, ranks):
    """Weights, moments, average, scale and counters after 50 steps are those of one process with the whole batch.

    To 1e-6, with a clipped norm, a nan in the batch of one rank, a nan in the shard of one rank, a veto on one rank,
    odd lengths, and on four ranks one without a row of some parameters.
    """
    for found in request.getfixturevalue(ranks)["trained"]:
        assert furthest(found, expected)[0] < 1e-6, furthest(found, expected)
        assert torch.equal(found["counters"], torch.tensor([50, 53, 50, 50]))
        assert torch.equal(found["scale"], expected["scale"])


def test_the_step_of_shards_is_folded(two):
    """Loss scale and clipping factor are divided out in the optimizer's own pass, as they are in one process."""
    assert [found["divisions"] for found in two["trained"]] == [["folded"]] * 2


def test_an_optimizer_that_is_not_fused(two, alone, folder):
    """An optimizer that takes no divisor along has the numbers of one process, too, and the outcome says why."""
    single = alone.unfused(folder)
    for found in two["unfused"]:
        assert furthest(found, single)[0] < 1e-6
        assert found["divisions"] == ["plain: the optimizer is not fused"]


@pytest.mark.parametrize("ranks", ["two", "four", "one"])
def test_what_two_ranks_save_any_number_loads(request, two, alone, folder, ranks):
    """A run saved on two ranks is loaded on one, two and four: bit for bit as it was, and ten steps on within 1e-6."""
    seen = [alone.loaded(folder)] if ranks == "one" else request.getfixturevalue(ranks)["loaded"]
    for found in seen:
        assert same(found["before"], two["saved"][0])
        assert furthest(found["after"], two["loaded"][0]["after"])[0] < 1e-6


def test_a_sharded_model_is_loaded_without_ranks(two, folder):
    """A model of FSDP2 that was saved with its description is built and loaded in one process, as a plain module."""
    model, _ = load_checkpoint(folder / "models").models["last"]
    assert type(model) is torch.nn.Linear
    assert model.weight.shape == (1, 5)


def test_each_rank_writes_what_it_holds(two, folder):
    """There is a file of each rank; none holds a pickle, and none the whole of what is spread."""
    manifest = read_manifest(folder / "run")
    shards = [one for name, one in manifest.sections.items() if name.startswith("shards/")]
    assert len(shards) == 2
    contents = [(folder / "run" / manifest.data / one.file).read_bytes() for one in shards]
    assert not any(b"pickle" in content or content[8:9] != b"{" for content in contents)
    assert all(b"models/main.first.weight" in content for content in contents)


def test_a_rank_that_cannot_write_stops_the_save_on_all(two):
    """A full disk on one rank is an error on both that names the rank; the earlier checkpoint can still be loaded."""
    for found in two["failures"]:
        assert "the disk is full" in found["full"]
        assert "rank 1" in found["full"]
        assert found["left"] == ["data", "manifest.json"]


def test_a_rank_whose_state_cannot_be_saved_stops_the_save_on_all(two):
    """Where the state of a hook on one rank is no plain data, that rank says so, and the other says who it was."""
    first, second = (found["unplain"] for found in two["failures"])
    assert first.startswith("CheckpointWriteError: The checkpoint was not written, because rank 1 failed.")
    assert second.startswith("NotPlainDataError")
    assert "['bad']" in first
    assert "['bad']" in second


def test_a_rank_that_dies_leaves_the_others_an_error(killed, alone, folder):
    """The death of a rank while it writes is an error on the other, and the earlier checkpoint is whole."""
    assert len(killed["one_is_killed"]) == 1
    assert "another rank is gone" in killed["one_is_killed"][0]["message"]
    run = alone.strategy(2)
    load_training(folder / "killed", run)
    assert run.step_count == 2


def test_the_checkpoint_hook_keeps_to_its_settings(two):
    """`CheckpointHook` on two ranks writes aside, keeps the last two, and goes on with them after a load."""
    for found in two["hooked"]:
        assert found == {
            "kept": ["step-00000009", "step-00000012"],
            "later": ["step-00000018", "step-00000020"],
            "steps": 20,
        }


def test_a_second_run_saves_into_the_same_folder(two):
    """A strategy that runs again goes on with its folder on every rank; another is refused there, on every rank."""
    for found in two["hooked_twice"]:
        assert found["left"] == ["step-00000002", "step-00000004"]
        assert "holds checkpoints of another run" in found["other"]


@pytest.fixture
def copied(two, folder, tmp_path):
    root = tmp_path / "copy"
    shutil.copytree(folder / "run", root)
    data = next(root.glob("data-*"))
    return root, data / "1.shards.safetensors"


@pytest.mark.parametrize("damage", ["altered", "truncated", "missing"])
def test_damage_to_the_file_of_a_rank_is_named(copied, alone, damage):
    """An altered, truncated or missing file of a rank is named, and nothing of the run has changed."""
    root, file = copied
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(content if damage == "altered" else content[:-9])
    run = alone.strategy(2)
    run.setup()
    before = alone.numbers(run)
    kind = CheckpointMissingError if damage == "missing" else CheckpointDamagedError
    with pytest.raises(kind, match=r"1\.shards\.safetensors"):
        load_training(root, run)
    assert same(before, alone.numbers(run))


def test_the_command_line_knows_the_files_of_ranks(copied):
    """``checkpoint show`` lists the file of each rank, and ``verify`` finds a byte that has changed."""
    root, file = copied
    ask = [sys.executable, "-m", "nvalchemi", "checkpoint"]
    shown = subprocess.run([*ask, "show", str(root)], capture_output=True, text=True, check=True, timeout=60).stdout
    assert "shards/1" in shown
    assert "Would load here: yes" in shown
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    verified = subprocess.run([*ask, "verify", str(root)], capture_output=True, text=True, check=False, timeout=60)
    assert verified.returncode == 1
    assert "shards/1" in verified.stdout
    assert "SHA-256" in verified.stdout
