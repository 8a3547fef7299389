"""What the hook accepts, what it refuses, and who it is."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from nvalchemi.hooks import CheckpointableHook, TrainContext
from nvalchemi.testing import UpdateLoop
from nvalchemi.training.hooks import TrainingUpdateOrchestrator
from nvalchemi_hooks_grad_clip import GradientClipHook
from nvalchemi_hooks_grad_clip.plugin import nvalchemi_hooks


@pytest.mark.parametrize("field", ["max_norm", "norm_type", "clip_value"])
@pytest.mark.parametrize("value", [0, 0.0, -1, -math.inf, math.nan, True, "1.0", [1.0], torch.tensor(1.0)])
def test_bad_thresholds_are_refused_when_the_hook_is_built(field, value):
    """Zero, negative numbers, nan, bools and strings are a ValueError that names field, value and remedy."""
    with pytest.raises(ValueError, match=f"GradientClipHook: {field} is ") as caught:
        GradientClipHook(**{field: value})
    assert repr(value) in str(caught.value)
    assert "give " in str(caught.value)


@pytest.mark.parametrize("field", ["max_norm", "norm_type"])
def test_none_is_no_threshold(field):
    """Only clip_value may be None."""
    with pytest.raises(ValueError, match=field):
        GradientClipHook(**{field: None})
    assert GradientClipHook(clip_value=None).clip_value is None


@pytest.mark.parametrize("field", ["per_optimizer", "error_if_nonfinite"])
@pytest.mark.parametrize("value", ["no", 0, 1, None])
def test_switches_are_bools(field, value):
    """What only looks like a switch is refused with its value."""
    with pytest.raises(ValueError, match=f"{field} is {value!r}; give True or False"):
        GradientClipHook(**{field: value})


def test_thresholds_are_numbers_of_any_kind():
    """Ints and inf are thresholds."""
    hook = GradientClipHook(max_norm=2, norm_type=math.inf, clip_value=1)
    assert (hook.max_norm, hook.norm_type, hook.clip_value) == (2.0, math.inf, 1.0)


def test_settings_are_keywords_with_the_documented_defaults():
    """The defaults are max_norm 1, the L2 norm, no cutting, one global norm, and a veto rather than an error."""
    with pytest.raises(TypeError):
        GradientClipHook(1.0)
    assert repr(GradientClipHook()) == (
        "GradientClipHook(max_norm=1.0, norm_type=2.0, clip_value=None, per_optimizer=False, error_if_nonfinite=False)"
    )


def test_ways_of_clipping_tell_instances_apart_and_thresholds_do_not():
    """A checkpoint fits after a threshold was changed; different ways of clipping compose, twins need labels."""
    assert GradientClipHook().state_key == GradientClipHook(max_norm=3.0).state_key == "grad_clip"
    ways = [
        GradientClipHook(),
        GradientClipHook(norm_type=1.0),
        GradientClipHook(per_optimizer=True),
        GradientClipHook(max_norm=math.inf),
        GradientClipHook(max_norm=math.inf, clip_value=1.0),
        GradientClipHook().labelled("mine"),
    ]
    assert len({hook.state_key for hook in ways}) == len(ways)
    assert len(list(TrainingUpdateOrchestrator(*ways).iter_hooks())) == len(ways)
    with pytest.raises(ValueError, match="grad_clip"):
        TrainingUpdateOrchestrator(GradientClipHook(), GradientClipHook(max_norm=2.0))


def test_without_an_orchestrator_the_hook_says_what_is_missing():
    """Called by hand on a fresh context, the hook names the orchestrator."""
    with pytest.raises(RuntimeError, match="TrainingUpdateOrchestrator"):
        GradientClipHook().before_optimizer_step(TrainContext(), will_skip=False)


def test_before_the_first_step_there_is_no_norm():
    """last_norm is nan and last_norms is empty until a window was measured."""
    hook = GradientClipHook()
    assert math.isnan(hook.last_norm)
    assert hook.last_norms == ()


def test_counters_survive_and_bad_states_change_nothing(zeros, sgd):
    """The state is the two counters, as plain ints; anything else is refused with its value."""
    weight, hook = zeros(1), GradientClipHook()
    run = UpdateLoop(hook, optimizers=[sgd(weight)])
    for gradient in (2.0, 0.5):
        run.batch({weight: gradient})
    assert isinstance(hook, CheckpointableHook)
    assert hook.state_dict() == {"clipped_steps": 1, "measured_steps": 2}
    fresh = GradientClipHook()
    for bad in ({}, {"clipped_steps": 1}, {"clipped_steps": -1, "measured_steps": 2}, {**hook.state_dict(), "x": 0}):
        with pytest.raises(ValueError, match="clipped_steps and measured_steps"):
            fresh.load_state_dict(bad)
        assert fresh.state_dict() == {"clipped_steps": 0, "measured_steps": 0}
    fresh.load_state_dict(hook.state_dict())
    assert (fresh.clipped_steps, fresh.measured_steps) == (1, 2)


def test_the_offer_makes_a_hook_with_and_without_settings():
    """Discovery finds one hook that anybody may have: default_kwargs is empty, not None."""
    (offer,) = nvalchemi_hooks()
    assert (offer.name, offer.default_kwargs) == ("grad_clip", {})
    assert isinstance(offer.factory(), GradientClipHook)
    assert offer.factory(max_norm=3.0).max_norm == 3.0


def test_the_door_is_lazy():
    """Importing the package or its plugin module loads neither torch nor pydantic."""
    code = (
        "import sys, nvalchemi_hooks_grad_clip as door, nvalchemi_hooks_grad_clip.plugin as plugin\n"
        "plugin.nvalchemi_hooks()\n"
        "print(dir(door), sorted({'torch', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['GradientClipHook'] []"


def test_the_public_doors_hand_out_the_class():
    """The class is the same at every door."""
    import nvalchemi.training
    import nvalchemi.training.hooks

    assert nvalchemi.training.GradientClipHook is nvalchemi.training.hooks.GradientClipHook is GradientClipHook
