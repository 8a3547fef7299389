"""A state that is refused, for whatever reason and however late, has changed nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from nvalchemi.errors import CheckpointMismatchError, NotPlainDataError
from nvalchemi.training import (
    OptimizerConfig,
    create_model_spec,
    load_checkpoint,
    load_training,
    save_checkpoint,
    save_training,
)

BATCH = torch.ones(4, 6), torch.zeros(4, 1)


@pytest.fixture
def make(make_strategy, kinds):
    """Make a run that accumulates over two batches, so that its state after five has gradients; a hook runs rarely."""

    def make():
        rare = kinds["Plain"](lambda ctx, stage: None, frequency=2)
        return make_strategy(kinds["Counting"](), kinds["Accumulate"](), rare)

    return make


@pytest.fixture
def refuses(differences):
    """Return the error with which a run refuses a state, after looking that it is as it was, its gradients too."""

    def check(target, state, kind=CheckpointMismatchError, match=""):
        before, gradients = copy.deepcopy(target.state_dict()), grads(target)
        with pytest.raises(kind, match=match):
            target.load_state_dict(state)
        assert differences(target.state_dict(), before) == []
        assert all(one is other for one, other in zip(grads(target), gradients, strict=True))

    return check


def grads(strategy):
    return [parameter.grad for model in strategy.models.values() for parameter in model.parameters()]


def trained(strategy, batches):
    for _ in range(batches):
        strategy.train_batch(BATCH)
    return strategy


BROKEN = {
    "no run": (lambda s: s.pop("run"), "not what a run saves: state has no 'run'; give what state_dict"),
    "no position": (lambda s: s.pop("position"), "state has no 'position'"),
    "no counters": (lambda s: s["run"].pop("counters"), "run has no 'counters'"),
    "a counter": (lambda s: s["run"]["counters"].update(epoch="3"), r"run\['counters'\]\['epoch'\] is '3', a str"),
    "last calls": (lambda s: s["run"].update(last_calls=[1]), r"run\['last_calls'\] is \[1\], a list, instead of"),
    "no steps": (lambda s: s["position"].pop("steps_before"), "position has no 'steps_before'"),
    "now": (lambda s: s["position"].update(now=None), r"position\['now'\] is None, a NoneType, instead of a mapping"),
    "random numbers": (
        lambda s: s["position"]["now"]["rng"].update(torch=torch.zeros(3, dtype=torch.uint8)),
        r"position\['now'\]\['rng'\] holds no state that the random numbers of torch can go on from",
    ),
    "hooks": (lambda s: s["hooks"].update(counting=3), r"hooks\['counting'\] is 3, an int, instead of a mapping"),
    "models": (lambda s: s.update(models=[]), r"models is \[\], a list, instead of a mapping"),
    "model": (lambda s: s["models"].update(main=None), r"models\['main'\] is None, a NoneType, instead of a mapping"),
    "optimizer": (lambda s: s["optimizers"][0].pop("state"), r"optimizers\[0\] has no 'state'"),
    "groups": (
        lambda s: s["optimizers"][0]["state"].pop("param_groups"),
        r"optimizers\[0\]\['state'\] has no 'param_groups'",
    ),
    "group": (
        lambda s: s["optimizers"][0]["state"]["param_groups"][0]["params"].pop(),
        r"has groups of \[3\] parameters, but the optimizer has groups of \[4\]",
    ),
    "moments": (
        lambda s: s["optimizers"][0]["state"]["state"][0].update(exp_avg=torch.zeros(1)),
        r"\[0\]\['exp_avg'\] is float32 of shape \(1,\), but its parameter is float32 of shape \(8, 6\)",
    ),
    "scheduler": (lambda s: s["schedulers"][0].update(state=5), r"schedulers\[0\]\['state'\] is 5, an int"),
    "gradient": (
        lambda s: s["gradients"]["main"].update({"0.weight": torch.zeros(1)}),
        r"gradient of main.0.weight is float32 of shape \(1,\) in the checkpoint, but the parameter is .*\(8, 6\)",
    ),
    "dtype of a gradient": (
        lambda s: s["gradients"]["main"].update({"0.bias": torch.zeros(8, dtype=torch.float64)}),
        r"gradient of main.0.bias is float64 of shape \(8,\)",
    ),
    "gradient of nothing": (
        lambda s: s["gradients"]["main"].update(other=torch.zeros(1)),
        "gradient of main.other is float32 .* but the parameter is not there",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_state_that_no_run_saves_is_named_and_changes_nothing(make, refuses, what):
    """A part that is missing, of another type or shape: a ValueError with the place, and nothing was taken over."""
    act, message = BROKEN[what]
    state = copy.deepcopy(trained(make(), 5).state_dict())
    act(state)
    refuses(trained(make(), 1), state, match=message)


def fail(*args):
    torch.rand(3)  # who loads may draw
    raise KeyError("refused late")


LATE = {
    "hook after the model": lambda s: s.models["main"][2].register_load_state_dict_post_hook(fail),
    "hook before the model": lambda s: s.models["main"][2].register_load_state_dict_pre_hook(fail),
    "hook before the optimizer": lambda s: s.optimizers[0].register_load_state_dict_pre_hook(fail),
    "hook after the optimizer": lambda s: s.optimizers[0].register_load_state_dict_post_hook(fail),
    "scheduler": lambda s: setattr(s.lr_schedulers[0], "load_state_dict", fail_once(s.lr_schedulers[0])),
    "position": lambda s: setattr(s._position, "load_state_dict", fail),
}


def fail_once(scheduler):
    load, calls = scheduler.load_state_dict, []

    def loading(state):
        load(state)
        calls.append(state)
        if len(calls) == 1:
            raise KeyError("refused late")

    return loading


@pytest.mark.parametrize("who", LATE)
def test_who_refuses_late_leaves_everything_as_it_was(make, refuses, who):
    """Hooks that torch calls around loading, and whoever else refuses after the others took over: all go back."""
    state = trained(make(), 5).state_dict()
    target = trained(make(), 1)
    LATE[who](target)
    refuses(target, state, KeyError, "refused late")


def test_a_state_loads_after_one_was_refused(make, differences):
    """What was refused leaves nothing behind that disturbs the next state."""
    source, target = trained(make(), 5), trained(make(), 1)
    state = source.state_dict()
    broken = copy.deepcopy(state)
    broken["schedulers"][0]["state"] = None
    with pytest.raises(CheckpointMismatchError):
        target.load_state_dict(broken)
    target.load_state_dict(state)
    assert differences(target.state_dict(), state) == []


def test_a_model_that_draws_while_it_loads_does_not_move_the_random_numbers(make):
    """The random numbers of a loaded run are those of the state, whatever its parts do to load."""
    state = trained(make(), 5).state_dict()
    target = make()
    target.models["main"].register_load_state_dict_post_hook(lambda module, keys: torch.seed() and None)
    target.load_state_dict(state)
    assert torch.equal(torch.get_rng_state(), state["position"]["now"]["rng"]["torch"])


@pytest.mark.parametrize("name", ["Adam", "Adafactor", "ASGD", "Adagrad", "Adadelta", "Rprop", "RMSprop", "NAdam"])
def test_states_of_torchs_optimizers_fit_themselves(make_strategy, differences, name):
    """What torch's own optimizers keep, single numbers and sums by row among it, passes the checks."""
    configs = OptimizerConfig(optimizer_cls=name)
    source, target = (make_strategy(optimizer_configs=configs) for _ in range(2))
    state = trained(source, 2).state_dict()
    target.load_state_dict(state)
    assert differences(target.state_dict(), state) == []


def lazy():
    torch.manual_seed(1)
    return nn.Sequential(nn.LazyLinear(8), nn.LazyLinear(1))


def test_lazy_modules_are_named_until_they_have_seen_a_batch(make_strategy, differences, tmp_path):
    """Saving or loading before that is refused with the remedy; with it, a run goes on exactly."""
    source, target = (make_strategy(models=lazy(), hooks=[]) for _ in range(2))
    with pytest.raises(NotPlainDataError, match=r"main.0.weight belongs to a lazy module .*call the model on a batch"):
        save_training(tmp_path, source)
    save_training(tmp_path, trained(source, 3))
    with pytest.raises(CheckpointMismatchError, match=r"main.0.weight belongs to a lazy module and has no shape yet"):
        load_training(tmp_path, target)
    model = lazy()
    model(BATCH[0])
    target = make_strategy(models=model, hooks=[])
    load_training(tmp_path, target)
    assert differences(trained(target, 2).state_dict(), trained(source, 2).state_dict()) == []


def test_lazy_models_are_built_from_their_description(tmp_path):
    """Before a batch there is nothing to save; after it, what is built anew takes its shapes from the file."""
    spec = create_model_spec(nn.ModuleList, modules=[create_model_spec(nn.LazyLinear, out_features=1)])
    model = spec.build()
    with pytest.raises(NotPlainDataError, match="main.0.weight belongs to a lazy module"):
        save_checkpoint(tmp_path, models={"main": (model, spec)})
    model[0](torch.ones(1, 3))
    save_checkpoint(tmp_path, models={"main": (model, spec)})
    assert torch.equal(load_checkpoint(tmp_path).models["main"][0][0].weight, model[0].weight)
