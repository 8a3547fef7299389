"""The settings, their bounds, and the key of an instance."""

from __future__ import annotations

import pydantic
import pytest

from nvalchemi.hooks import CheckpointableHook, ProvidesAveragedModel
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator
from nvalchemi_hooks_ema import EMAHook


def test_the_defaults_are_those_that_are_documented():
    """Without a word, the main model is averaged with a decay of 0.999 after every step, buffers included."""
    assert EMAHook().model_dump() == {
        "model_key": "main",
        "decay": 0.999,
        "update_every": 1,
        "start_step": 0,
        "use_buffers": True,
        "num_updates": 0,
    }


def test_it_is_a_pydantic_model_and_an_update_hook():
    """The class is both, with the agreed configuration and priority, and does not read gradients."""
    assert issubclass(EMAHook, pydantic.BaseModel)
    assert issubclass(EMAHook, TrainingUpdateHook)
    assert EMAHook.model_config == {"arbitrary_types_allowed": True, "extra": "forbid"}
    hook = EMAHook()
    assert (hook.name, hook.priority, hook.reads_grad) == ("ema", 50, False)
    assert isinstance(hook, CheckpointableHook)
    assert isinstance(hook, ProvidesAveragedModel)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_key", ""),
        ("model_key", 3),
        ("decay", -0.001),
        ("decay", 1.0),
        ("decay", float("nan")),
        ("decay", "a lot"),
        ("update_every", 0),
        ("update_every", 1.5),
        ("start_step", -1),
        ("num_updates", -1),
        ("use_buffers", "perhaps"),
        ("momentum", 0.9),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_the_name_of_its_field(field: str, value: object):
    """A violation or an unknown keyword is a ValidationError that names the field."""
    with pytest.raises(pydantic.ValidationError) as caught:
        EMAHook(**{field: value})
    assert [error["loc"] for error in caught.value.errors()] == [(field,)]


@pytest.mark.parametrize(
    ("field", "value"),
    [("decay", 0.0), ("decay", 0.9999999), ("update_every", 1), ("start_step", 0)],
)
def test_the_bounds_themselves_are_legal(field: str, value: float):
    """The smallest and largest legal values are accepted."""
    assert getattr(EMAHook(**{field: value}), field) == value


def test_settings_are_keyword_only():
    """A positional argument is refused."""
    with pytest.raises(TypeError):
        EMAHook("main")


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({}, "ema"),
        ({"decay": 0.99}, "ema[decay=0.99]"),
        ({"model_key": "student", "decay": 0.99}, "ema[model_key=student,decay=0.99]"),
        (
            {"use_buffers": False, "update_every": 2, "start_step": 5},
            "ema[update_every=2,start_step=5,use_buffers=False]",
        ),
        ({"num_updates": 7}, "ema"),
    ],
)
def test_the_state_key_holds_what_differs_from_the_defaults(settings: dict, key: str):
    """Instances are told apart by their settings, and by nothing that changes while they train."""
    assert EMAHook(**settings).state_key == key


def test_a_label_replaces_the_state_key():
    """The user's own name for an instance wins."""
    assert EMAHook(decay=0.99).labelled("slow").state_key == "slow"


def test_two_averages_of_different_decay_live_in_one_orchestrator():
    """Instances that differ can be composed; twins without labels are refused, and with labels they are not."""
    TrainingUpdateOrchestrator(EMAHook(decay=0.9), EMAHook(decay=0.99))
    with pytest.raises(ValueError, match="cannot be told apart"):
        TrainingUpdateOrchestrator(EMAHook(), EMAHook())
    TrainingUpdateOrchestrator(EMAHook().labelled("one"), EMAHook().labelled("two"))


def test_equal_hooks_are_still_two_hooks():
    """Hooks compare and hash by identity, with tensors in them too."""
    one, two = EMAHook(), EMAHook()
    assert one == one  # noqa: PLR0124
    assert one != two
    assert len({one, two}) == 2
