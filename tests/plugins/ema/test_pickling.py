"""The hook in other processes."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from nvalchemi_hooks_ema import EMAHook

SPAWN = """
import copy
import multiprocessing

import torch
from torch import nn

from nvalchemi.hooks import TrainContext
from nvalchemi_hooks_ema import EMAHook


def train(hook, model, steps):
    for step in steps:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(step + 0.1)
        hook.after_optimizer_step(TrainContext(models={"main": model}, step_count=step), skipped=False)
    return hook, {name: value.tolist() for name, value in hook.state_dict()["averaged_model_state"].items()}


if __name__ == "__main__":
    torch.manual_seed(0)
    model, hook = nn.Linear(3, 2), EMAHook(decay=0.9)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for steps in (range(3), range(3, 6)):  # before any training, and after some
            theirs = copy.deepcopy((hook, model, steps))  # what is sent is shared, and would be trained in both
            expected = pool.apply(train, theirs)[1]
            assert train(hook, model, steps)[1] == expected
        returned, _ = pool.apply(train, copy.deepcopy((hook, model, range(6, 8))))
    assert returned.num_updates == 8 and hook.num_updates == 6
"""


@pytest.mark.parametrize("clone", [lambda hook: pickle.loads(pickle.dumps(hook)), copy.deepcopy])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_pickled_or_copied_hook_goes_on_the_same(clone, dtype, steps, follow, perturb, same):
    """Before and after training, the clone has state, label and settings, and further steps have equal numbers."""
    torch.manual_seed(0)
    model, hook = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(dtype), EMAHook(decay=0.9).labelled("mine")
    for step in range(steps):
        perturb(model, step)
        follow(hook, model, step)
    other = clone(hook)
    assert same(other.state_dict(), hook.state_dict())
    assert other.state_key == "mine"
    for step in range(steps, steps + 3):
        perturb(model, step)
        follow(hook, model, step)
        follow(other, model, step)
    assert same(other.state_dict(), hook.state_dict())
    assert other.get_averaged_model() is not hook.get_averaged_model()


def test_a_pending_state_is_pickled(primed, follow):
    """A state that waits for the model survives pickling."""
    model = nn.Linear(1, 1, bias=False)
    waiting = EMAHook(decay=0.5)
    waiting.load_state_dict(primed(model, 2.0, decay=0.5).state_dict())
    other = pickle.loads(pickle.dumps(waiting))
    with torch.no_grad():
        model.weight.fill_(4.0)
    follow(other, model, 1)
    assert other.get_averaged_model().module.weight.item() == 3.0


def test_it_survives_spawn(tmp_path):
    """A spawned worker continues with equal numbers, before and after training, and sends the hook back."""
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
