"""Writes that fail: they are heard of, and harm nothing."""

from __future__ import annotations

import errno
import math
import shutil
import subprocess
import sys

import pytest
import torch

from nvalchemi.errors import CheckpointWriteError
from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage, load_training
from nvalchemi_hooks_checkpoint import CheckpointHook, best_checkpoint, latest_checkpoint

BATCHES = [torch.full((2, 1), float(i)) for i in range(1, 5)]
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_is_reported_and_the_run_goes_on(root, strategy, gate, steps, asynchronous):
    """The error names the path and what is left; caught, the same run goes on, and its next save is written."""
    made = strategy(CheckpointHook(root=root, every_steps=2, asynchronous=asynchronous), num_steps=8)
    gate.failures = [None, FULL]
    with pytest.raises(CheckpointWriteError) as caught:
        made.run(BATCHES)
    assert str(root / "step-00000004") in str(caught.value)
    assert "No space left on device" in str(caught.value)
    assert f"the latest checkpoint is {root / 'step-'}" in str(caught.value)
    assert isinstance(caught.value, OSError)
    assert caught.value.errno == errno.ENOSPC
    assert steps(root)[0] == 2  # a save that waited behind the lost one may have been made since
    assert not (root / "step-00000004").exists()
    made.run(BATCHES)
    assert made.step_count == 8
    assert (steps(root)[0], steps(root)[-1]) == (2, 8)


def test_the_earlier_checkpoint_loads_after_a_failure(root, strategy, gate):
    """What was complete before a write failed is as it was, although only one is kept."""
    made = strategy(CheckpointHook(root=root, every_steps=2, keep=1), num_steps=4)
    made.run(BATCHES[:2])  # two passes of two batches
    assert latest_checkpoint(root).name == "step-00000004"
    gate.failures = [FULL, FULL]
    with pytest.raises(CheckpointWriteError):
        made.run(BATCHES[:2])
    loaded = strategy(CheckpointHook(root=root, every_steps=2, keep=1), num_steps=4)
    load_training(latest_checkpoint(root), loaded)
    assert loaded.step_count == 4


def test_a_failure_of_the_last_write_is_raised_at_the_end(root, strategy, gate):
    """Nothing is saved after it, and still the user hears of it when the run is over."""
    made = strategy(CheckpointHook(root=root, every_steps=4), num_steps=4)
    gate.failures = [FULL]
    with pytest.raises(CheckpointWriteError, match=r"failed to write .*step-00000004.*there is no earlier checkpoint"):
        made.run(BATCHES)
    assert made.step_count == 4


def test_a_failure_does_not_hide_the_error_that_ended_the_run(root, strategy, gate):
    """Where the run fails of itself, its own error is raised, and the lost checkpoint is noted on it."""
    made = strategy(CheckpointHook(root=root, every_steps=2), num_steps=8)
    gate.failures = [FULL]
    with pytest.raises(ZeroDivisionError) as caught:
        made.run(_Broken())
    assert any("step-00000002" in note for note in caught.value.__notes__)


class _Broken:
    def __iter__(self):
        yield from BATCHES[:2]
        raise ZeroDivisionError

    def __len__(self):
        return 8


def test_a_failure_is_raised_once(root, strategy, gate):
    """Having been raised at a save, it is not raised again at the end."""
    hook = CheckpointHook(root=root, every_steps=2)
    made = strategy(hook, num_steps=4)
    gate.failures = [FULL]
    with pytest.raises(CheckpointWriteError):
        made.run(BATCHES)
    hook.flush()
    hook.close()


def test_on_request_a_failure_is_a_warning(root, strategy, gate, steps):
    """With on_error="warn" the run goes to its end, and each lost checkpoint is one warning that names it."""
    made = strategy(CheckpointHook(root=root, every_steps=2, on_error="warn"), num_steps=8)
    gate.failures = [FULL, FULL]
    with pytest.warns(RuntimeWarning, match="failed to write") as caught:
        made.run(BATCHES)
    lost = [str(one.message) for one in caught if "failed to write" in str(one.message)]
    assert [f"step-0000000{step}" in text for step, text in zip((2, 4), lost, strict=True)] == [True, True]
    assert steps(root) == [6, 8]


@pytest.mark.parametrize("held_up", [False, True])
def test_a_best_that_was_not_written_is_not_the_best(root, strategy, gate, held_up):
    """The best before stays, and so does its value: the next one has to beat that one, also if it comes in between."""

    class HoldUp:
        frequency, stage = 1, TrainingStage.AFTER_BATCH

        def __call__(self, ctx, stage):
            if ctx.step_count == 7 and held_up:
                gate.open_soon()  # so the write of step 8 is under way at the next validation

    hook = CheckpointHook(root=root, best="loss", keep=1, on_error="warn")
    made = strategy(hook, HoldUp(), losses=[3.0, 1.0, 2.0], num_epochs=3)
    gate.failures = [None, FULL]
    with pytest.warns(RuntimeWarning, match="step-00000008"):
        made.run(BATCHES)
    assert best_checkpoint(root) == root / "step-00000012"
    assert hook.state_dict()["values"] == {"step-00000012": 2.0}


@pytest.mark.parametrize(("settings", "left"), [({"keep": 2}, [2, 4]), ({"keep": 1, "best": "loss"}, [1, 4])])
def test_what_a_lost_checkpoint_would_have_replaced_is_kept(root, strategy, gate, steps, settings, left):
    """One that waits behind a write that fails removes what it makes superfluous itself, and nothing else."""
    hook = CheckpointHook(root=root, every_steps=1, on_error="warn", **settings)
    made = strategy(hook, num_steps=99)

    def train(loss):
        made.train_batch(BATCHES[0])
        ctx = TrainContext(step_count=made.step_count, workflow=made, validation={"loss": loss})
        hook(ctx, TrainingStage.AFTER_VALIDATION)

    with hook:
        train(loss=3.0)
        train(loss=4.0)
        hook.flush()
        gate.opened.clear()
        gate.failures = [FULL]
        train(loss=1.0)
        train(loss=math.nan)
        gate.opened.set()
        with pytest.warns(RuntimeWarning, match="step-00000003"):
            hook.flush()
    assert steps(root) == left
    assert best_checkpoint(root) == (root / "step-00000001" if "best" in settings else None)


def test_a_copy_that_cannot_be_taken_is_an_error_at_once(root, strategy, monkeypatch):
    """State that cannot be saved at all is a mistake in a program, no accident: it is raised where it happens."""
    hook = CheckpointHook(root=root, every_steps=2, on_error="warn")
    made = strategy(hook, num_steps=4)
    monkeypatch.setattr(type(made), "state_dict", lambda self: {"run": {"oops": object()}})
    with pytest.raises(TypeError, match="oops"):
        made.run(BATCHES)
    assert latest_checkpoint(root) is None
    assert hook.state_dict()["kept"] == []


LIMITED = """
import resource, signal, sys, warnings
import torch
from torch import nn
from nvalchemi.errors import CheckpointWriteError
from nvalchemi.training import CheckpointHook, OptimizerConfig, TrainingStrategy, load_training
from nvalchemi_hooks_checkpoint import latest_checkpoint

root = sys.argv[1]
def strategy():
    return TrainingStrategy(models=nn.Linear(200, 200), optimizer_configs=OptimizerConfig(), num_steps=2,
        loss_fn=lambda p, b: p.square().mean(), hooks=[CheckpointHook(root=root, every_steps=2)])
run = strategy()
batches = [torch.ones(2, 200)] * 2
run.run(batches)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
try:
    run.run(batches)
except CheckpointWriteError as error:
    print("failed", "step-00000004" in str(error))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("latest", latest_checkpoint(root).name)
load_training(latest_checkpoint(root), strategy())
run.run(batches)  # finishes the run that was interrupted
run.run(batches)
print("latest", latest_checkpoint(root).name)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits on the size of files are POSIX")
def test_a_limit_on_file_size_is_a_full_disk(root):
    """With a real limit the write fails, the earlier checkpoint loads, and once there is room the run goes on."""
    done = subprocess.run([sys.executable, "-c", LIMITED, str(root)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["failed True", "latest step-00000002", "latest step-00000006"]


def test_several_failures_are_all_told(root, strategy, gate):
    """The first is raised, the others are notes on it."""
    hook = CheckpointHook(root=root, every_steps=1)
    made = strategy(hook, num_steps=99)
    gate.failures = [FULL, FULL]
    gate.opened.clear()
    with hook:
        made.train_batch(BATCHES[0])
        made.train_batch(BATCHES[0])
        gate.opened.set()
        with pytest.raises(CheckpointWriteError, match="failed to write .*step-00000001") as caught:
            hook.flush()
    (note,) = caught.value.__notes__
    assert f"failed to write {root / 'step-00000002'}. No space left on device." in note


def test_a_copy_that_could_not_be_written_is_let_go_of(root, strategy, gate):
    """A failure that is kept to be reported holds no memory of the state, and so a full disk does not fill it."""
    hook = CheckpointHook(root=root, every_steps=1)
    made = strategy(hook, num_steps=99)
    failure = OSError(errno.ENOSPC, "No space left on device")
    gate.failures = [failure]
    with hook:
        made.train_batch(BATCHES[0])
        with pytest.raises(CheckpointWriteError) as caught:
            hook.flush()
    assert caught.value.__cause__ is failure
    assert gate.alive == 0


def test_an_index_that_cannot_be_written_leaves_nothing_behind(root, strategy):
    """What was written aside is removed when it cannot take its place."""
    (root / "index.json").mkdir(parents=True)
    made = strategy(CheckpointHook(root=root, every_steps=2, at_end=False), num_steps=2)
    with pytest.raises(CheckpointWriteError, match="directory"):
        made.run(BATCHES)
    assert [path.name for path in root.iterdir()] == ["index.json"]


def test_half_a_checkpoint_is_never_taken_for_one(root, run, monkeypatch):
    """A removal that fails on its way leaves something that is not complete, is reported, and loses no other."""
    hook = CheckpointHook(root=root, every_steps=2, keep=1)

    def fail(folder):
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(shutil, "rmtree", fail)
    with pytest.raises(CheckpointWriteError, match=r"Permission denied.*the latest checkpoint is .*step-00000004"):
        run(hook, num_steps=4)
    assert latest_checkpoint(root) == root / "step-00000004"
    assert not (root / "step-00000002" / "manifest.json").exists()
