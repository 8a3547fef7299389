"""When a run that only skips is stopped, and what is said then."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from nvalchemi.errors import NonFiniteGradientError
from nvalchemi.hooks import CheckpointableHook, TrainContext
from nvalchemi.testing import UpdateLoop
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateOrchestrator
from nvalchemi_hooks_scaler_veto import GradScalerVetoHook


def until_it_stops(run, gradients, most=200):
    """Repeat a batch until it raises; return how many there were, and the error."""
    for batch in range(1, most + 1):
        try:
            run.batch(gradients)
        except NonFiniteGradientError as error:
            return batch, error
    return most, None


@pytest.mark.parametrize("scaled", [False, True], ids=["no scaler", "torch's scaler"])
@pytest.mark.parametrize("limit", [1, 3, 25])
def test_a_permanent_nan_stops_the_run_at_the_limit(sgd, limit, scaled):
    """The N-th skip in a row raises, naming the number, the first bad parameter, the scale and the remedy."""
    model = nn.ModuleDict({"first": nn.Linear(1, 1), "second": nn.Linear(1, 1)})
    named = dict(model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0) if scaled else None
    hook = GradScalerVetoHook(max_consecutive_skips=limit)
    run = UpdateLoop(hook, optimizers=[sgd(*named.values())], scaler=scaler, models={"main": model})
    bad = {"first.weight": 1.0, "first.bias": math.nan, "second.weight": math.inf, "second.bias": 1.0}
    batches, error = until_it_stops(run, {named[name]: gradient for name, gradient in bad.items()})
    assert batches == limit
    assert f"{limit} windows in a row" in str(error)
    assert "'first.bias'" in str(error)
    assert "max_consecutive_skips" in str(error)
    assert any("GradScalerVetoHook" in note for note in error.__notes__)
    assert ("loss scale is now" in str(error)) is scaled
    if scaled:
        assert scaler.get_scale() == 65536.0 / 2**limit > 0.0
        assert f"{scaler.get_scale():g}" in str(error)


def test_the_default_limit_leaves_a_scale_to_recover_with(zeros, sgd):
    """From 65536 the default stops at a scale above 0, long before nothing is left of it."""
    weight = zeros(1)
    run = UpdateLoop(
        GradScalerVetoHook(), optimizers=[sgd(weight)], scaler=torch.amp.GradScaler("cpu", init_scale=65536.0)
    )
    batches, error = until_it_stops(run, {weight: math.nan})
    assert error is not None
    assert batches == 25
    assert run.scaler.get_scale() > 1e-3


def test_none_never_stops(zeros, sgd):
    """Without a limit the run goes on, and both counts go on with it."""
    weight, hook = zeros(1), GradScalerVetoHook(max_consecutive_skips=None)
    batches, error = until_it_stops(UpdateLoop(hook, optimizers=[sgd(weight)]), {weight: math.nan}, most=60)
    assert (batches, error) == (60, None)
    assert (hook.consecutive_skips, hook.total_skips) == (60, 60)


def test_one_good_step_starts_the_count_anew(zeros, sgd):
    """Two skips, a step and two skips are no three in a row."""
    weight, hook = zeros(1), GradScalerVetoHook(max_consecutive_skips=3)
    run = UpdateLoop(hook, optimizers=[sgd(weight)])
    for gradient in (math.inf, math.inf, 1.0, math.inf, math.inf):
        run.batch({weight: gradient})
    assert (hook.consecutive_skips, hook.total_skips) == (2, 4)
    with pytest.raises(NonFiniteGradientError, match="3 windows in a row"):
        run.batch({weight: math.inf})


def test_a_parameter_of_no_model_has_no_name(zeros, sgd):
    """Where no model holds the culprit the message says so."""
    weight = zeros(1)
    run = UpdateLoop(GradScalerVetoHook(max_consecutive_skips=1), optimizers=[sgd(weight)])
    with pytest.raises(NonFiniteGradientError, match=r"no parameter of ctx\.models"):
        run.batch({weight: math.inf})


def test_several_models_are_told_apart(zeros, sgd):
    """With several models the culprit is named with its model, in the order of the models."""
    models = {"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}
    weights = [parameter for model in models.values() for parameter in model.parameters()]
    run = UpdateLoop(GradScalerVetoHook(max_consecutive_skips=1), optimizers=[sgd(*weights)], models=models)
    with pytest.raises(NonFiniteGradientError, match=r"'b\.weight'"):
        run.batch(dict(zip(weights, (1.0, 1.0, math.nan, math.nan), strict=True)))


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "3", math.inf])
def test_bad_limits_are_refused_when_the_hook_is_built(limit):
    """Zero, negative numbers, bools and what is no int are a ValueError that names field, value and remedy."""
    with pytest.raises(ValueError, match="GradScalerVetoHook: max_consecutive_skips is ") as caught:
        GradScalerVetoHook(max_consecutive_skips=limit)
    assert repr(limit) in str(caught.value)
    assert "give an int" in str(caught.value)


def test_counters_survive_and_the_limit_holds_over_a_resume(zeros, sgd):
    """A run saved after two skips stops at the next when the limit is three; bad states change nothing."""
    weight, hook = zeros(1), GradScalerVetoHook(max_consecutive_skips=3)
    run = UpdateLoop(hook, optimizers=[sgd(weight)])
    for _ in range(2):
        run.batch({weight: math.inf})
    assert isinstance(hook, CheckpointableHook)
    state = hook.state_dict()
    assert state == {"consecutive_skips": 2, "total_skips": 2}
    resumed = GradScalerVetoHook(max_consecutive_skips=3)
    for bad in ({}, {"total_skips": 1}, {"consecutive_skips": True, "total_skips": 2}, {**state, "x": 0}):
        with pytest.raises(ValueError, match="consecutive_skips and total_skips"):
            resumed.load_state_dict(bad)
        assert resumed.state_dict() == {"consecutive_skips": 0, "total_skips": 0}
    resumed.load_state_dict(state)
    with pytest.raises(NonFiniteGradientError):
        UpdateLoop(resumed, optimizers=[sgd(weight)]).batch({weight: math.inf})


def test_a_lazy_run_names_the_culprit_while_its_gradient_is_there():
    """In lazy mode the skip that reaches the limit is known at once, so that the error can name the parameter."""
    model = torch.nn.ParameterDict({"fine": torch.ones(2), "broken": torch.ones(2)})
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    hook = GradScalerVetoHook(max_consecutive_skips=2)
    update = TrainingUpdateOrchestrator(hook, lazy=True)

    def step(factor):
        with TrainContext(models={"main": model}, optimizers=[optimizer]) as ctx:
            update(ctx, TrainingStage.BEFORE_BATCH)
            ctx.loss = model["fine"].sum() + (model["broken"] * factor).sum()
            for stage in ("DO_BACKWARD", "DO_OPTIMIZER_STEP", "AFTER_OPTIMIZER_STEP"):
                update(ctx, TrainingStage[stage])

    step(1.0)
    step(torch.inf)
    assert update.pending is not None  # the first skip is not the last: nobody waits for it
    with pytest.raises(NonFiniteGradientError, match="'broken'"):
        step(torch.inf)
    assert hook.consecutive_skips == 2
