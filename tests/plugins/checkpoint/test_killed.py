"""``kill -9``, again and again, of a run that saves all the time and goes on from its latest checkpoint."""

from __future__ import annotations

import os
import random
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nvalchemi.training import TrainingStage, load_training
from nvalchemi_hooks_checkpoint import best_checkpoint, latest_checkpoint

ENDLESS = Path(__file__).with_name("endless.py")
KILLS = int(os.environ.get("NVALCHEMI_TEST_KILLS", "6"))


@pytest.fixture(scope="module")
def endless():
    """The module of the run."""
    return runpy.run_path(str(ENDLESS))


@pytest.fixture(scope="module")
def starter():
    """A process that starts the run for every folder that it is told."""
    process = subprocess.Popen([sys.executable, ENDLESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    yield process
    process.stdin.close()
    process.wait(timeout=30)


def run_for(starter, root, seconds):
    """Start the run and kill it after some time."""
    starter.stdin.write(f"{root}\n")
    starter.stdin.flush()
    child = int(starter.stdout.readline())
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    assert starter.stdout.readline() == f"{-signal.SIGKILL}\n", "the run ended before it was killed"


class Record:
    """Remembers the weights after every step."""

    frequency, stage = 1, TrainingStage.AFTER_BATCH

    def __init__(self):
        self.weights = {}

    def __call__(self, ctx, stage):
        self.weights[ctx.step_count] = weights(ctx.workflow)


def weights(strategy):
    return [tensor.tolist() for tensor in strategy.models["main"].parameters()]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kill -9 and fork are POSIX")
def test_a_run_that_is_killed_again_and_again_is_the_straight_run(starter, endless, root, steps):
    """After every kill there is a checkpoint that loads, no older than before, with the weights of the straight run."""
    seed = random.SystemRandom().randrange(2**32)
    moments = random.Random(seed)
    seen, before = {}, 0
    for number in range(KILLS):
        run_for(starter, root, moments.uniform(0.02, 0.4))
        latest = latest_checkpoint(root)
        if latest is None:
            assert not seen, f"seed {seed}, kill {number}: the checkpoint is gone"
            continue
        strategy = endless["make_strategy"](endless["make_hook"](root))
        load_training(latest, strategy)
        assert strategy.step_count >= max(seen, default=0), f"seed {seed}, kill {number}"
        most = max(
            endless["KEEP"] + 2, before + 1
        )  # the last, the best, and a new one: it was killed before it removed
        assert len(steps(root)) <= most, f"seed {seed}, kill {number}: {steps(root)}"
        before = len(steps(root))
        seen[strategy.step_count] = weights(strategy)
    assert len(seen) > KILLS / 4, "the kills came too early, so this has tested next to nothing"
    recorded = Record()
    straight = endless["make_strategy"](recorded, steps=max(seen))
    straight.run(endless["make_loader"]())
    assert seen == {step: recorded.weights[step] for step in seen}, f"seed {seed}"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kill -9 and fork are POSIX")
def test_a_run_that_was_killed_leaves_nothing_behind(starter, endless, root, steps):
    """A run that goes on after kills and comes to its end leaves the last ones and the best, and nothing else."""
    for _ in range(3):
        run_for(starter, root, 0.3)
    while (latest := latest_checkpoint(root)) is None:  # a slow machine
        run_for(starter, root, 1.0)
    strategy = endless["make_strategy"](endless["make_hook"](root), Stop(latest, steps=6))
    load_training(latest, strategy)
    with pytest.raises(Stopped):
        strategy.run(endless["make_loader"]())
    last = {f"step-{strategy.step_count - back:08}" for back in (0, 1)}
    assert {path.name for path in root.iterdir()} == last | {best_checkpoint(root).name, "index.json"}


class Stopped(Exception):
    """The run was stopped, in an orderly way."""


class Stop:
    """Stops a run so many steps after a checkpoint."""

    frequency, stage = 1, TrainingStage.AFTER_BATCH

    def __init__(self, latest, *, steps):
        self.last = int(latest.name.removeprefix("step-")) + steps

    def __call__(self, ctx, stage):
        if ctx.step_count == self.last:
            raise Stopped
