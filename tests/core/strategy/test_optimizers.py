"""From descriptions to optimizers and schedulers: one or several, of one model or several."""

from __future__ import annotations

import re
import reprlib

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from nvalchemi.errors import UnsupportedOptimizerError
from nvalchemi.training import OptimizerConfig, TrainingStrategy
from nvalchemi.training.closures import refuse_closure


def sgd(lr=0.1, **options):
    return OptimizerConfig(optimizer_cls="SGD", optimizer_kwargs={"lr": lr}, **options)


def test_one_config_trains_the_main_model(make_strategy, batches):
    """An OptimizerConfig alone trains ``"main"``: all parameters that require a gradient."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].bias.requires_grad_(False)
    strategy = make_strategy(models=model, optimizer_configs=OptimizerConfig())
    strategy.run(batches)
    assert len(strategy.optimizers) == 1
    assert type(strategy.optimizers[0]) is torch.optim.AdamW
    assert strategy.optimizers[0].param_groups[0]["params"] == [model[0].weight, *model[1].parameters()]


def test_parameter_groups_are_chosen_from_the_model(make_strategy, batches):
    """`parameters` gives the optimizer groups as torch takes them, with options of their own."""
    config = sgd(
        parameters=lambda model: [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "momentum": 0.9}]
    )
    model = nn.Linear(2, 1)
    strategy = make_strategy(models=model, optimizer_configs=config)
    strategy.run(batches)
    groups = strategy.optimizers[0].param_groups
    assert [(group["lr"], group["momentum"]) for group in groups] == [(0.5, 0), (0.1, 0.9)]
    assert groups[0]["params"] == [model.weight]


def test_several_optimizers_of_one_model_share_the_step(make_strategy, batches):
    """A list of configs gives several optimizers for one model; each trains its own parameters in one step."""
    configs = [
        sgd(0.1, parameters=lambda m: [m.weight]),
        sgd(0.2, parameters=lambda m: [m.bias], scheduler_cls="StepLR", scheduler_kwargs={"step_size": 2}),
    ]
    model = nn.Linear(2, 1)
    strategy = make_strategy(models=model, optimizer_configs={"main": configs})
    before = [p.detach().clone() for p in model.parameters()]
    strategy.run(batches)
    assert strategy.step_count == 4
    assert [type(o).__name__ for o in strategy.optimizers] == ["SGD", "SGD"]
    assert [o.param_groups[0]["params"][0] for o in strategy.optimizers] == [model.weight, model.bias]
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert strategy.optimizers[1].param_groups[0]["lr"] == pytest.approx(0.002)
    assert strategy.optimizers[0].param_groups[0]["lr"] == 0.1


def test_several_models_equal_a_loop_by_hand(make_strategy, batches):
    """Two models with an optimizer each train as the loop written by hand does, bit for bit."""
    torch.manual_seed(5)
    models = {"encoder": nn.Linear(2, 3), "head": nn.Linear(3, 1)}
    torch.manual_seed(5)
    encoder, head = nn.Linear(2, 3), nn.Linear(3, 1)
    make_strategy(
        models=models,
        optimizer_configs={"encoder": sgd(0.1), "head": OptimizerConfig(optimizer_kwargs={"lr": 0.01})},
        training_fn=lambda models, batch: models["head"](models["encoder"](batch[0])),
        num_epochs=3,
    ).run(batches)
    optimizers = torch.optim.SGD(encoder.parameters(), lr=0.1), torch.optim.AdamW(head.parameters(), lr=0.01)
    for x, y in batches * 3:
        for optimizer in optimizers:
            optimizer.zero_grad()
        (head(encoder(x)) - y).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    trained = [*models["encoder"].parameters(), *models["head"].parameters()]
    for a, b in zip(trained, [*encoder.parameters(), *head.parameters()], strict=True):
        assert torch.equal(a, b)


def test_a_scheduler_moves_once_for_every_step(make_strategy, veto, batches):
    """A scheduler moves with each executed step of its optimizer and waits while steps are vetoed."""
    config = sgd(1.0, scheduler_cls="LambdaLR", scheduler_kwargs={"lr_lambda": lambda step: 1.0 / (1 + step)})
    strategy = make_strategy(veto(1, 2), optimizer_configs=config)
    strategy.run(batches)
    assert strategy.optimizers[0].param_groups[0]["lr"] == pytest.approx(1 / 3)


def test_the_default_training_fn_calls_the_main_model(make_strategy, batches):
    """Without a `training_fn` the main model is called with the batch."""
    targets = torch.zeros(3, 1)
    strategy = make_strategy(
        training_fn=None, loss_fn=lambda predictions, batch: (predictions - targets).square().mean()
    )
    strategy.run([x for x, _ in batches])
    assert strategy.step_count == 4


def test_a_single_model_is_what_training_fn_gets_whatever_its_name(make_strategy, batches):
    """`training_fn` gets the module where there is one model, and the dict of all where there are several."""
    seen = []

    def forward(model, batch):
        seen.append(model)
        model = model if isinstance(model, nn.Module) else model["net"]
        return model(batch[0])

    net = nn.Linear(2, 1)
    make_strategy(models={"net": net}, optimizer_configs={"net": sgd()}, training_fn=forward).train_batch(batches[0])
    models = {"net": net, "other": nn.Linear(2, 1)}
    make_strategy(models=models, optimizer_configs={"net": sgd()}, training_fn=forward).train_batch(batches[0])
    assert seen[0] is net
    assert dict(seen[1]) == models


def test_an_optimizer_key_that_is_no_model_is_refused(make_strategy):
    """An optimizer key that is no model is a ValueError naming the key, the closest model, and all of them."""
    message = r"optimizer_configs has an entry for 'mian', but there is no model.*did you mean 'main'\?.*\['main'\]"
    with pytest.raises(ValueError, match=message):
        make_strategy(optimizer_configs={"mian": sgd()})


@pytest.mark.parametrize("configs", [{}, {"main": []}])
def test_no_optimizer_at_all_is_refused(make_strategy, configs):
    """Configs that make no optimizer are a ValueError: nothing would be trained."""
    with pytest.raises(ValueError, match=r"nothing would be trained; give an OptimizerConfig"):
        make_strategy(optimizer_configs=configs)


@pytest.mark.parametrize("wrong", ["SGD", torch.optim.SGD, {"lr": 1.0}, None])
def test_something_else_than_a_config_is_refused(make_strategy, wrong):
    """Something else than an OptimizerConfig is a TypeError with the key, the kind, the value and the remedy."""
    kind, value = type(wrong).__name__, re.escape(reprlib.repr(wrong))
    message = rf"optimizer_configs\['main'\] is a {kind}, {value}; give OptimizerConfig\("
    with pytest.raises(TypeError, match=message):
        make_strategy(optimizer_configs={"main": wrong})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer_cls": "Adamw"}, r"(?s)optimizer_cls.*torch.optim has no class 'Adamw'; did you mean 'AdamW'"),
        ({"scheduler_cls": "StepLr"}, r"(?s)scheduler_cls.*has no class 'StepLr'; did you mean 'StepLR'"),
        ({"optimizer_cls": nn.Linear}, r"(?s)optimizer_cls.*subclass of Optimizer"),
        ({"lr": 0.1}, r"(?s)lr.*Extra inputs are not permitted"),
    ],
)
def test_a_wrong_field_of_a_config_is_refused(options, message):
    """A field of an OptimizerConfig that does not fit is a ValidationError with its name and the closest match."""
    with pytest.raises(ValidationError, match=message):
        OptimizerConfig(**options)


def test_a_config_can_be_shared(make_strategy, batches):
    """A config holds no state: two models with the same one get optimizers of their own."""
    config = sgd()
    strategy = make_strategy(
        models={"main": nn.Linear(2, 1), "other": nn.Linear(2, 1)},
        optimizer_configs={"main": config, "other": config},
        training_fn=lambda models, batch: models["main"](batch[0]) + models["other"](batch[0]),
    )
    strategy.run(batches)
    assert len({id(o) for o in strategy.optimizers}) == 2


def test_an_optimizer_that_needs_a_closure_is_refused(make_strategy):
    """LBFGS is refused when it is configured, by name, with what to use instead."""
    with pytest.raises(
        UnsupportedOptimizerError, match=r"LBFGS needs a closure.*use an optimizer whose step\(\)"
    ) as info:
        make_strategy(optimizer_configs=OptimizerConfig(optimizer_cls="LBFGS"))
    assert isinstance(info.value, TypeError)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "NAdam", "SparseAdam", "Adafactor"])
def test_optimizers_that_can_do_without_a_closure_are_let_in(name):
    """An optimizer whose step can do without a closure is let in, and so is one whose step takes nothing."""

    class Own(torch.optim.SGD):
        def step(self):
            super().step()

    refuse_closure(getattr(torch.optim, name))
    refuse_closure(Own)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"models": {}}, r"models is \{\}; give an nn.Module, or a mapping"),
        ({"models": [nn.Linear(1, 1)]}, r"models is \[.*give an nn.Module, or a mapping"),
        ({"models": {"main": nn.Linear}}, r"models\['main'\] is a type; give names \(str\) and nn.Modules"),
        ({"models": {1: nn.Linear(1, 1)}}, r"models\[1\] is a Linear; give names \(str\)"),
        ({"loss_fn": None}, r"loss_fn is None; give a callable: loss_fn\(predictions, batch\)"),
        ({"training_fn": 3}, r"training_fn is 3; give a callable: training_fn\(model, batch\)"),
        ({"validation": []}, r"validation is a list; give Validation\(loader=...\)"),
    ],
)
def test_arguments_of_another_type_are_refused(wrong, message):
    """An argument of another type is a TypeError that names it, its value, and what to give."""
    right = {"models": nn.Linear(1, 1), "optimizer_configs": sgd(), "loss_fn": lambda p, b: p.sum(), "num_epochs": 1}
    with pytest.raises(TypeError, match=message):
        TrainingStrategy(**{**right, **wrong})
