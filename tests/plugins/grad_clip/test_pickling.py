"""The hook goes where processes go."""

from __future__ import annotations

import copy
import math
import multiprocessing
import pickle
import runpy
from pathlib import Path

import pytest
import torch

from nvalchemi_hooks_grad_clip import GradientClipHook

GO_ON = str(Path(__file__).with_name("go_on.py"))


def go_on(hook, out, *, spawn=False):
    """Train three steps with a hook, here or in a spawned process, and return what came of it."""
    arguments = GO_ON, {"hook": hook, "out": out}, "__main__"
    if spawn:
        process = multiprocessing.get_context("spawn").Process(target=runpy.run_path, args=arguments)
        process.start()
        process.join(120)
        assert process.exitcode == 0
    else:
        runpy.run_path(*arguments)
    return torch.load(out, weights_only=True)


@pytest.mark.parametrize("options", [{}, {"per_optimizer": True, "clip_value": 0.5, "norm_type": math.inf}])
def test_a_pickled_hook_is_the_same_hook_before_and_after_training(tmp_path, options):
    """A round trip keeps settings, counters, last norms and label, and training goes on with equal numbers."""
    hook = GradientClipHook(**options).labelled("mine")
    for _ in range(2):
        twin = pickle.loads(pickle.dumps(hook))
        assert repr(twin) == repr(hook)
        assert twin.state_key == "mine"
        assert twin.state_dict() == hook.state_dict()
        assert repr((twin.last_norm, twin.last_norms)) == repr((hook.last_norm, hook.last_norms))
        torch.testing.assert_close(
            go_on(twin, tmp_path / "a"), go_on(copy.deepcopy(hook), tmp_path / "b"), rtol=0, atol=0
        )
        go_on(hook, tmp_path / "c")
    assert hook.measured_steps == 6
    assert hook.clipped_steps == 2


def test_a_spawned_process_goes_on_with_equal_numbers(tmp_path):
    """A hook that trained here trains on in a spawned process as it would here."""
    hook = GradientClipHook()
    go_on(hook, tmp_path / "before")
    there = go_on(hook, tmp_path / "there", spawn=True)
    here = go_on(hook, tmp_path / "here")
    torch.testing.assert_close(there, here, rtol=0, atol=0)
    assert here["state"] == {"grad_clip": {"clipped_steps": 2, "measured_steps": 6}}
