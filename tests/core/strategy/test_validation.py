"""Validation: on what, how often, with which weights, in which context."""

from __future__ import annotations

import math
import re
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from nvalchemi.training import OptimizerConfig, TrainingStage, Validation
from nvalchemi.training.hooks import TrainingUpdateHook

S = TrainingStage


def by_hand(model, batches):
    with torch.no_grad():
        losses = [float((model(x) - y).double().square().mean()) for x, y in batches]
    return sum(losses) / len(losses)


def test_validate_gives_mean_losses_and_changes_nothing(make_strategy, batches):
    """`validate(loader)` gives the mean loss over the batches; weights, gradients and counters stay as they are."""
    strategy = make_strategy()
    strategy.run(batches)
    model = strategy.models["main"]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    grads = [p.grad.clone() for p in model.parameters()]
    result = strategy.validate(batches)
    assert result["loss"] == pytest.approx(by_hand(model, batches), rel=1e-6)
    assert (result.weights, result.batches) == ("live", 4)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, model.parameters(), strict=True))
    assert (strategy.step_count, strategy.batch_count, strategy.epoch) == (4, 4, 1)


def test_named_losses_are_validated_by_name(make_strategy, batches):
    """Named losses each have their mean, beside ``"loss"``."""

    def loss_fn(predictions, batch):
        return {"square": (predictions - batch[1]).square().mean(), "size": predictions.abs().mean()}

    result = make_strategy(loss_fn=loss_fn).validate(batches)
    assert set(result) == {"square", "size", "loss"}
    assert result["loss"] == pytest.approx(result["square"] + result["size"])


def test_an_empty_validation_loader_is_refused(make_strategy):
    """An empty validation loader is a ValueError with the remedy, and no result is kept."""
    strategy = make_strategy()
    with pytest.raises(ValueError, match="validation loader gave no batches; give one that holds data"):
        strategy.validate([])
    assert strategy.validation_result is None


def test_nothing_to_validate_on_is_refused(make_strategy):
    """`validate()` without a loader anywhere is a ValueError that says how to give one."""
    with pytest.raises(ValueError, match=r"nothing to validate on: give validate\(loader\), or validation="):
        make_strategy().validate()


def test_an_iterator_is_refused_as_a_validation_loader(batches):
    """An iterator as the loader of a Validation is a ValueError: it would be used up after one pass."""
    with pytest.raises(
        ValueError, match="is an iterator, which is used up after one pass; give a list or a DataLoader"
    ):
        Validation(loader=iter(batches))


def test_describing_a_validation_iterates_nothing(batches):
    """Making a Validation does not begin to iterate the loader: no worker is started, no random number drawn."""
    begun = []

    class Loader:
        def __iter__(self):
            begun.append("iter")
            return iter(batches)

    Validation(loader=Loader())
    assert begun == []


@pytest.mark.parametrize("name", ["every_epochs", "every_steps"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_a_cadence_is_an_int_of_one_or_more(name, value):
    """A cadence that is not an int of 1 or more is a ValueError with its name and value."""
    with pytest.raises(
        ValueError, match=rf"Validation.{name} is {re.escape(repr(value))}; it must be an int of 1 or more"
    ):
        Validation(loader=[], **{name: value})


def test_unknown_weights_are_refused(make_strategy, batches):
    """Weights of another name are a ValueError with the value and what there is, here and at `validate`."""
    message = r'is \'shadow\'; it must be "auto", "live" or "averaged"'
    with pytest.raises(ValueError, match=message):
        Validation(loader=batches, weights="shadow")
    with pytest.raises(ValueError, match=message):
        make_strategy().validate(batches, weights="shadow")


@pytest.mark.parametrize(
    ("plan", "length", "expected"),
    [
        ({}, {"num_epochs": 3}, [4, 8, 12]),
        ({"every_epochs": 2}, {"num_epochs": 5}, [8, 16]),
        ({"every_steps": 3}, {"num_epochs": 2}, [3, 6]),
        ({"every_steps": 2}, {"num_steps": 5}, [2, 4]),
        ({"every_steps": 3}, {"num_steps": 3}, [3]),
    ],
)
def test_the_cadence_counts_epochs_or_executed_steps(make_strategy, plain, batches, plan, length, expected):
    """`every_epochs` counts epochs that have ended, `every_steps` executed steps."""
    seen = []
    spy = plain(lambda ctx, stage: seen.append(ctx.step_count), S.AFTER_VALIDATION)
    make_strategy(spy, validation=Validation(loader=batches, **plan), **length).run(batches)
    assert seen == expected


def test_both_cadences_validate_once_at_a_time(make_strategy, plain, batches):
    """Where the end of an epoch is also a multiple of `every_steps`, there is one validation, not two."""
    seen = []
    spy = plain(lambda ctx, stage: seen.append(ctx.step_count), S.AFTER_VALIDATION)
    plan = Validation(loader=batches, every_epochs=1, every_steps=2)
    make_strategy(spy, validation=plan).run(batches)
    assert seen == [2, 4]


def test_averaged_weights_are_validated_where_a_hook_provides_them(make_strategy, average, batches):
    """With a hook that provides an averaged model its module is evaluated by default, the live one on request."""
    hook = average()
    strategy = make_strategy(hook, num_epochs=2)
    strategy.run(batches)
    live, shadow = by_hand(strategy.models["main"], batches), by_hand(hook.averaged.module, batches)
    assert not math.isclose(live, shadow, rel_tol=1e-3)
    for weights, expected, used in [
        (None, shadow, "averaged"),
        ("auto", shadow, "averaged"),
        ("averaged", shadow, "averaged"),
        ("live", live, "live"),
    ]:
        result = strategy.validate(batches, weights=weights)
        assert result["loss"] == pytest.approx(expected, rel=1e-6)
        assert result.weights == used


def test_the_plan_says_which_weights(make_strategy, average, batches):
    """`Validation(weights=...)` holds for validations of the run and for `validate()` without weights."""
    strategy = make_strategy(average(), validation=Validation(loader=batches, weights="live"))
    strategy.run(batches)
    assert strategy.validation_result.weights == "live"
    assert strategy.validate().weights == "live"
    assert strategy.validate(weights="averaged").weights == "averaged"


def test_before_the_first_average_the_live_weights_are_validated(make_strategy, average, batches):
    """Before an average exists, and before it was updated, the live weights are evaluated, and the result says so."""
    strategy = make_strategy(average(start=4))
    assert strategy.validate(batches).weights == "live"
    strategy.run(batches)
    assert strategy.validate(batches, weights="averaged").weights == "live"
    strategy.run(batches)
    assert strategy.validate(batches).weights == "averaged"


def test_only_the_model_of_the_model_key_is_averaged(make_strategy, average, batches):
    """Of several models the one under the hook's `model_key` is replaced by its average, the others are live."""
    hook = average("head")
    seen = []

    def forward(models, batch):
        seen.append(dict(models))
        return models["head"](models["body"](batch[0]))

    models = {"body": nn.Linear(2, 2), "head": nn.Linear(2, 1)}
    config = OptimizerConfig(optimizer_cls="SGD", optimizer_kwargs={"lr": 0.1})
    strategy = make_strategy(hook, models=models, optimizer_configs=dict.fromkeys(models, config), training_fn=forward)
    strategy.run(batches)
    strategy.validate(batches)
    assert seen[0] == models
    assert seen[-1] == {"body": models["body"], "head": hook.averaged.module}


def test_an_average_of_a_plain_hook_counts_too(make_strategy, plain, batches):
    """A plain hook with `model_key` and `get_averaged_model` provides averaged weights as well."""

    class Averaging(plain):
        model_key = "main"

        def get_averaged_model(self):
            return self.averaged

    def start(ctx, stage):
        hook.averaged = torch.optim.swa_utils.AveragedModel(ctx.models["main"])
        hook.averaged.update_parameters(ctx.models["main"])

    hook = Averaging(start, S.SETUP)
    assert make_strategy(hook).validate(batches).weights == "averaged"


class Precise(TrainingUpdateHook):
    """Provides a context for inference, and writes down when it is open."""

    def __init__(self, log):
        self.log = log

    @contextmanager
    def inference_context(self, device):
        self.log.append(("open", device.type))
        try:
            with torch.autocast(device.type, torch.bfloat16):
                yield
        finally:
            self.log.append(("closed", device.type))


def test_validation_runs_inside_the_inference_contexts_of_hooks(make_strategy, batches):
    """A hook with `inference_context` has its context open around validation, and only there."""
    log = []

    def forward(model, batch):
        log.append(torch.is_autocast_enabled("cpu"))
        return model(batch[0]).float()

    strategy = make_strategy(Precise(log), training_fn=forward)
    strategy.train_batch(batches[0])
    strategy.validate(batches[:1])
    strategy.validate(batches[:1])
    assert log == [False, *[("open", "cpu"), True, ("closed", "cpu")] * 2]


def test_an_inference_context_is_closed_whatever_raises(make_strategy, batches):
    """When validation is interrupted its contexts are closed and modes restored; no result is kept."""
    log, model = [], nn.Linear(2, 1)

    def forward(model, batch):
        raise KeyboardInterrupt

    strategy = make_strategy(Precise(log), models=model, training_fn=forward)
    with pytest.raises(KeyboardInterrupt):
        strategy.validate(batches)
    assert log == [("open", "cpu"), ("closed", "cpu")]
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert model.training
    assert strategy.validation_result is None


def test_reduce_lr_on_plateau_moves_with_validation_alone(make_strategy, batches):
    """`ReduceLROnPlateau` moves with `validate`, by its loss, and never with a step."""
    config = OptimizerConfig(
        optimizer_cls="SGD",
        optimizer_kwargs={"lr": 1e-9},
        scheduler_cls="ReduceLROnPlateau",
        scheduler_kwargs={"patience": 0, "factor": 0.5, "threshold": 0.1, "eps": 0.0},
    )
    strategy = make_strategy(optimizer_configs=config, num_epochs=3)
    strategy.run(batches)

    def rate():
        return strategy.optimizers[0].param_groups[0]["lr"]

    assert rate() == 1e-9
    strategy.validate(batches)
    assert rate() == 1e-9
    strategy.validate(batches)
    assert rate() == 0.5e-9
    assert strategy.lr_schedulers[0].best == pytest.approx(strategy.validation_result["loss"])


def test_the_latest_result_is_in_the_context(make_strategy, plain, batches):
    """`ctx.validation` is None before the first validation and the latest result afterwards."""
    seen = []
    spy = plain(lambda ctx, stage: seen.append(ctx.validation), S.BEFORE_EPOCH, S.AFTER_BATCH)
    strategy = make_strategy(spy, num_epochs=2, validation=Validation(loader=batches))
    strategy.run(batches[:1])
    assert seen[:2] == [None, None]
    assert seen[2] is seen[3]
    assert set(seen[2]) == {"loss"}
