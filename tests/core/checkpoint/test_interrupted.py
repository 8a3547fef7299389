"""``kill -9`` and a full disk: what was completed last is there, and the run goes on from it."""

from __future__ import annotations

import os
import random
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from nvalchemi.errors import CheckpointMissingError, CheckpointWriteError
from nvalchemi.training import load_training, save_training
from nvalchemi.training.checkpoint.manifest import read_manifest

SAVER = Path(__file__).with_name("constant_saver.py")
KILLS = int(os.environ.get("NVALCHEMI_TEST_KILLS", "20"))


@pytest.fixture(scope="module")
def saver():
    """The module of the run that saves constantly."""
    return runpy.run_path(str(SAVER))


@pytest.fixture(scope="module")
def starter():
    """A process that starts a run that saves constantly for every line it is given."""
    process = subprocess.Popen([sys.executable, SAVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    yield process
    process.stdin.close()
    process.wait(timeout=30)


def run_until(starter, root, seconds):
    """Start a run and kill it after some time; returns how long it took, and whether it was killed."""
    starter.stdin.write(f"{root}\n")
    starter.stdin.flush()
    child, begin = int(starter.stdout.readline()), time.monotonic()
    if seconds is not None:
        time.sleep(seconds)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    assert starter.stdout.readline() == "over\n"
    return time.monotonic() - begin


def weights(strategy):
    return [tensor.tolist() for tensor in strategy.models["main"].parameters()]


def test_kill_9_never_costs_a_completed_checkpoint(starter, saver, tmp_path):
    """At whatever moment a run is killed: what was completed loads, and the resumed run equals the straight one."""
    straight = saver["make_strategy"]()
    straight.run(saver["make_loader"]())
    whole = run_until(starter, tmp_path / "whole", None)
    seed = random.SystemRandom().randrange(2**32)
    moments = random.Random(seed)
    found = set()
    for number in range(KILLS):
        root = tmp_path / str(number)
        moment = moments.uniform(0, whole)
        run_until(starter, root, moment)
        resumed = saver["make_strategy"]()
        try:
            load_training(root, resumed)
        except CheckpointMissingError:
            assert not (root / "manifest.json").exists(), f"seed {seed}, kill {number} after {moment} s"
        found.add(resumed.batch_count)
        resumed.run(saver["make_loader"]())
        assert weights(resumed) == weights(straight), f"seed {seed}, kill {number} after {moment} s"
        shutil.rmtree(root, ignore_errors=True)
    assert len(found) > min(KILLS, 20) / 5, "the kills came all at the same steps, so this has tested nothing"


def test_a_killed_run_can_save_in_the_same_place_again(starter, saver, tmp_path):
    """What an interrupted save left behind is removed by the next one."""
    whole = run_until(starter, tmp_path / "whole", None)
    for part in (0.3, 0.5, 0.7):
        run_until(starter, tmp_path / "root", whole * part)
    run_until(starter, tmp_path / "root", None)
    manifest = read_manifest(tmp_path / "root")
    assert manifest.metadata["progress"]["step_count"] == saver["STEPS"]
    assert {path.name for path in (tmp_path / "root").iterdir()} == {"manifest.json", manifest.data}


@contextmanager
def files_no_larger_than(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_grows_too_large_is_an_error_and_training_goes_on(saver, tmp_path):
    """The error says what the matter is; the earlier checkpoint loads; the run goes on as if it had not tried."""
    straight, strategy = saver["make_strategy"](), saver["make_strategy"]()
    straight.run(saver["make_loader"]())
    failures = []

    class Save:
        frequency, stage = 1, saver["SaveAlways"].stage

        def __call__(self, ctx, stage):
            with files_no_larger_than(2000 if ctx.batch_count > 5 else resource.RLIM_INFINITY):
                try:
                    save_training(tmp_path / "root", ctx.workflow)
                except OSError as error:
                    failures.append(error)

    strategy = saver["make_strategy"](Save())
    strategy.run(saver["make_loader"]())
    assert len(failures) == saver["STEPS"] - 5
    assert isinstance(failures[0], CheckpointWriteError)
    assert "not written: the file is too large. An earlier checkpoint there is as it was" in str(failures[0])
    assert str(tmp_path / "root") in str(failures[0])
    assert weights(strategy) == weights(straight)
    manifest = read_manifest(tmp_path / "root")
    assert {path.name for path in (tmp_path / "root").iterdir()} == {"manifest.json", manifest.data}
    resumed = saver["make_strategy"]()
    load_training(tmp_path / "root", resumed)
    assert resumed.batch_count == 5
    resumed.run(saver["make_loader"]())
    assert weights(resumed) == weights(straight)


def test_a_full_disk_is_called_a_full_disk(tmp_path):
    """On a tmpfs of 64 KiB: the first save fits, the second does not, says so, and leaves the first."""
    script = textwrap.dedent(
        """
        import sys, torch
        from nvalchemi.training.checkpoint.files import write_sections
        from nvalchemi.training.checkpoint.reading import open_sections
        write_sections(sys.argv[1], {"a": torch.ones(5000)}, kind="training")
        try:
            write_sections(sys.argv[1], {"a": torch.zeros(9000)}, kind="training")
        except OSError as error:
            print(error)
        with open_sections(sys.argv[1], kind="training") as (sections, _):
            print(sections["a"].sum().item())
        """
    )
    mounted = 'mount -t tmpfs -o size=64k none "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mounted, "sh", tmp_path, sys.executable, script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"this system lets nobody mount a small disk: {done.stderr.strip()}")
    assert done.stderr == ""
    message, total = done.stdout.splitlines()
    assert "was not written: the disk is full. An earlier checkpoint there is as it was" in message
    assert total == "5000.0"
