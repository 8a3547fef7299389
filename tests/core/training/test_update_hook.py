"""The contract of one update hook."""

from __future__ import annotations

import inspect

import pytest
import torch
from pydantic import BaseModel

from nvalchemi.hooks import Hook, HookRegistry, TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import (
    AlwaysVeto,
    PassThrough,
    TrainingUpdateHook,
    TrainingUpdateOrchestrator,
    UpdatePriority,
)


class Log(TrainingUpdateHook):
    """Overrides every stage method."""

    def __init__(self) -> None:
        self.calls = []

    def setup(self, ctx):
        self.calls.append("setup")

    def before_batch(self, ctx, *, will_skip):
        self.calls.append(("before_batch", will_skip))
        return False

    def transform_loss(self, ctx, loss):
        self.calls.append(("transform_loss", loss.item()))
        return loss * 3

    def before_optimizer_step(self, ctx, *, will_skip):
        self.calls.append(("before_optimizer_step", will_skip))
        return False

    def after_optimizer_step(self, ctx, *, skipped):
        self.calls.append(("after_optimizer_step", skipped))


def test_an_update_hook_is_no_hook():
    """An update hook is not a `Hook`: it has no `frequency` and no `stage`."""
    assert not isinstance(PassThrough(), Hook)
    assert not hasattr(PassThrough(), "frequency")
    assert not hasattr(PassThrough(), "stage")


def test_it_reaches_the_registry_only_inside_an_orchestrator():
    """The registry refuses a bare update hook, and takes its orchestrator."""
    registry = HookRegistry(TrainingStage)
    with pytest.raises(ValueError, match="PassThrough is no hook"):
        registry.register(PassThrough())
    registry.register(TrainingUpdateOrchestrator(PassThrough()))
    assert len(registry) == 1


@pytest.mark.parametrize(
    ("class_name", "name"),
    [
        ("EMAHook", "ema"),
        ("GradientClipHook", "gradient_clip"),
        ("MixedPrecisionHook", "mixed_precision"),
        ("SkipSpikes", "skip_spikes"),
        ("HTTPServerHook", "http_server"),
        ("Level2Hook", "level2"),
        ("HookedOnHook", "hooked_on"),
        ("Hook", "hook"),
    ],
)
def test_the_default_name(class_name, name):
    """The default name is the class's name in snake case, without "hook"."""
    assert type(class_name, (TrainingUpdateHook,), {}).name == name


def test_a_class_may_choose_its_name():
    """A class that sets a name keeps it, and a subclass of it gets a name of its own."""

    class Chosen(TrainingUpdateHook):
        name = "another"

    class ChildOfChosen(Chosen):
        pass

    assert (Chosen.name, ChildOfChosen.name) == ("another", "child_of_chosen")


def test_the_defaults():
    """An update hook has priority 50, reads gradients, defers no vetoes and belongs to no family."""
    hook = type("Plain", (TrainingUpdateHook,), {})()
    assert (hook.priority, hook.reads_grad, hook.defers_veto, hook.exclusive_family) == (50, True, False, None)


def test_the_signature_of_call():
    """``__call__(ctx, stage, will_skip=False)`` is what an orchestrator calls."""
    parameters = inspect.signature(TrainingUpdateHook().__call__).parameters
    assert list(parameters) == ["ctx", "stage", "will_skip"]
    assert parameters["will_skip"].default is False


def test_one_typed_method_a_stage():
    """The base class's ``__call__`` calls one typed method per stage and returns ``(proceed, loss)``."""
    hook, ctx = Log(), TrainContext(loss=torch.tensor(2.0))
    answers = [
        hook(ctx, TrainingStage.SETUP),
        hook(ctx, TrainingStage.BEFORE_BATCH, True),
        hook(ctx, TrainingStage.DO_BACKWARD),
        hook(ctx, TrainingStage.DO_OPTIMIZER_STEP, True),
        hook(ctx, TrainingStage.AFTER_OPTIMIZER_STEP, True),
    ]
    assert hook.calls == [
        "setup",
        ("before_batch", True),
        ("transform_loss", 2.0),
        ("before_optimizer_step", True),
        ("after_optimizer_step", True),
    ]
    assert [proceed for proceed, _ in answers] == [True, False, True, False, True]
    assert answers[2][1].item() == 6.0


def test_other_stages_call_nothing():
    """At every other stage the base class calls no method and proceeds."""
    hook, ctx = Log(), TrainContext(loss=torch.tensor(2.0))
    claimed = {"SETUP", "BEFORE_BATCH", "DO_BACKWARD", "DO_OPTIMIZER_STEP", "AFTER_OPTIMIZER_STEP"}
    for stage in TrainingStage:
        if stage.name not in claimed:
            assert hook(ctx, stage) == (True, ctx.loss)
    assert hook.calls == []


def test_the_base_versions_do_nothing():
    """The base versions proceed, and return the loss as it is."""
    hook, ctx = PassThrough(), TrainContext(loss=torch.tensor(2.0))
    for stage in TrainingStage:
        proceed, loss = hook(ctx, stage, True)
        assert proceed is True
        assert loss is ctx.loss


def test_before_optimizer_step_is_not_called_in_an_open_window():
    """While ``ctx.window_complete`` is False, `before_optimizer_step` is not called."""
    hook = Log()
    assert hook(TrainContext(window_complete=False), TrainingStage.DO_OPTIMIZER_STEP, True) == (True, None)
    assert hook.calls == []


def test_always_veto_vetoes_the_step_alone():
    """`AlwaysVeto` vetoes the optimizer step and no other stage."""
    ctx = TrainContext(loss=torch.tensor(2.0))
    votes = {stage.name for stage in TrainingStage if not AlwaysVeto()(ctx, stage)[0]}
    assert votes == {"DO_OPTIMIZER_STEP"}


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("before_optimiser_step", "before_optimizer_step"),
        ("before_step", "before_batch|before_optimizer_step"),
        ("after_step", "after_optimizer_step"),
        ("transform_los", "transform_loss"),
        ("set_up", "setup"),
        ("settle", "settled"),
        ("do_backward", "before_batch|transform_loss"),
        ("after_batch", "before_batch"),
    ],
)
def test_a_misspelt_stage_method_raises_at_class_creation(misspelt, meant):
    """An unknown stage method is refused when the class is made, with the closest match."""
    with pytest.raises(TypeError, match=rf"Typo\.{misspelt} .*did you mean ({meant})\?"):
        type("Typo", (TrainingUpdateHook,), {misspelt: lambda self, ctx: None})


@pytest.mark.parametrize("harmless", ["state_dict", "close", "_before_step", "measure", "get_averaged_model"])
def test_other_methods_are_the_authors_own(harmless):
    """Methods that look like no stage are left alone."""
    assert hasattr(type("Fine", (TrainingUpdateHook,), {harmless: lambda self: None}), harmless)


def test_the_state_key_is_the_label_or_the_name():
    """`state_key` identifies an instance: its label if the user gave one, else its name."""
    hook = PassThrough()
    assert (hook.state_key, hook.label) == ("pass_through", None)
    assert hook.labelled("first") is hook
    assert (hook.state_key, hook.label) == ("first", "first")
    assert PassThrough().state_key == "pass_through"


def test_a_pydantic_model_can_be_an_update_hook():
    """A pydantic model becomes an update hook by naming the base first; only its own fields are fields."""

    class ScaledHook(TrainingUpdateHook, BaseModel):
        factor: float = 1.0

        def transform_loss(self, ctx, loss):
            return loss * self.factor

    hook = ScaledHook(factor=2.0).labelled("mine")
    assert set(ScaledHook.model_fields) == {"factor"}
    assert (hook.name, hook.state_key, hook.reads_grad, hook.priority) == ("scaled", "mine", True, 50)
    assert hook(TrainContext(loss=torch.tensor(2.0)), TrainingStage.DO_BACKWARD)[1].item() == 4.0


def test_reads_grad_and_defers_veto_may_be_set_on_an_instance():
    """`reads_grad` and `defers_veto` may be set on the class or on one instance."""
    hook = Log()
    hook.reads_grad, hook.defers_veto = False, True
    assert (hook.reads_grad, hook.defers_veto, Log.reads_grad, Log.defers_veto) == (False, True, True, False)


def test_the_priority_table():
    """Priorities: 10 accumulation, 20 scaling, 25 scaler veto, 30 clipping, 40 spike skipping, 50 everything else."""
    assert [int(priority) for priority in UpdatePriority] == [10, 20, 25, 30, 40, 50]
    assert {p.name: int(p) for p in UpdatePriority if p.name in ("SCALE", "CHECK_FINITE", "CLIP", "DEFAULT")} == {
        "SCALE": 20,
        "CHECK_FINITE": 25,
        "CLIP": 30,
        "DEFAULT": 50,
    }


def test_every_line_of_the_priority_table_has_its_reason():
    """One table in the code, each line with its own reason."""
    reasons = [priority.reason for priority in UpdatePriority]
    assert all(len(reason) > 20 for reason in reasons)
    assert len(set(reasons)) == len(reasons)
