"""The protocols: everything the core may call on a hook."""

from __future__ import annotations

import inspect

import pytest

from nvalchemi.hooks import (
    CheckpointableHook,
    GradientScaler,
    Hook,
    LooksAhead,
    ProvidesAveragedModel,
    ProvidesInferenceContext,
    protocols,
)
from nvalchemi.training import TrainingStage


class Plain:
    """A hook as a user writes it."""

    frequency = 1
    stage = TrainingStage.AFTER_BATCH

    def __call__(self, ctx, stage):
        """Do nothing."""


class Stateful(Plain):
    """A hook with a state."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        """Take nothing."""


def without(name):
    """Return an object like `Plain` that lacks one member."""
    members = {"frequency": 1, "stage": None, "__call__": lambda self, ctx, stage: None}
    del members[name]
    return type("Lacks", (), members)()


def test_a_hook_is_known_by_its_shape():
    """`Hook` is a runtime-checkable protocol: `frequency`, `stage` (which may be None) and ``__call__(ctx, stage)``."""
    assert isinstance(Plain(), Hook)
    assert isinstance(type("Everywhere", (Plain,), {"stage": None})(), Hook)


@pytest.mark.parametrize("name", ["frequency", "stage", "__call__"])
def test_each_member_of_a_hook_is_needed(name):
    """An object that lacks one of the three members is no `Hook`."""
    assert not isinstance(without(name), Hook)


def test_the_call_of_a_hook():
    """A hook is called with the context and the stage."""
    assert list(inspect.signature(Hook.__call__).parameters) == ["self", "ctx", "stage"]


def test_a_checkpointable_hook_is_known_by_its_shape():
    """`CheckpointableHook` is a runtime-checkable protocol: ``state_dict()`` and ``load_state_dict(state)``."""
    assert isinstance(Stateful(), CheckpointableHook)
    assert not isinstance(Plain(), CheckpointableHook)
    assert not isinstance(type("Half", (), {"state_dict": dict})(), CheckpointableHook)


def test_the_optional_powers_are_protocols():
    """That a hook averages a model, or has a context for inference, is told by a runtime-checkable protocol."""

    class Averages(Plain):
        model_key = "main"

        def get_averaged_model(self):
            """Give none."""

    class Casts(Plain):
        def inference_context(self, device):
            """Give none."""

    class Asks(Plain):
        looks_ahead = True

    assert isinstance(Asks(), LooksAhead)
    assert not isinstance(Plain(), LooksAhead)
    assert isinstance(Averages(), ProvidesAveragedModel)
    assert isinstance(Casts(), ProvidesInferenceContext)
    assert not isinstance(Plain(), ProvidesAveragedModel | ProvidesInferenceContext)


def test_a_scaler_that_folds_is_a_protocol():
    """A scaler that folds has `is_enabled`, `scale`, `divisor` and `close`, all of them."""
    members = {name: lambda self, *_: None for name in ("is_enabled", "scale", "divisor", "close")}
    assert isinstance(type("Scaler", (), members)(), GradientScaler)
    for name in members:
        fewer = {key: value for key, value in members.items() if key != name}
        assert not isinstance(type("Scaler", (), fewer)(), GradientScaler), name


def test_everything_is_documented():
    """Every protocol that the core may look for is public and says what it is for."""
    for name in protocols.__all__:
        protocol = getattr(protocols, name)
        assert inspect.getdoc(protocol), name
        members = [m for key, m in vars(protocol).items() if inspect.isfunction(m) and not key.startswith("_")]
        assert all(member.__doc__ for member in members), name


def test_nothing_a_third_party_writes_starts_with_an_underscore():
    """Nothing a third party has to write starts with an underscore, `_runs_on_stage` aside."""
    underscored = {
        key
        for name in protocols.__all__
        for key, member in vars(getattr(protocols, name)).items()
        if inspect.isfunction(member) and key.startswith("_") and not key.endswith("__")
    }
    assert underscored - {"_no_init_or_replace_init"} == {"_runs_on_stage"}
