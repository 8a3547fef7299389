"""Which models learn during a run, which stay as they are, and what they are given back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nvalchemi.training import OptimizerConfig, TrainingStage, Validation
from nvalchemi.training.modes import evaluation_mode, training_modes

S = TrainingStage


def block():
    return nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.5), nn.BatchNorm1d(1))


@pytest.fixture
def pair():
    """A model that is trained and a teacher that is not; the teacher was in train mode, half of it frozen."""
    teacher = block()
    teacher[0].bias.requires_grad_(False)
    teacher[1].eval()
    return {"main": nn.Linear(2, 1).eval(), "teacher": teacher}


def distill(models, batch):
    with torch.no_grad():
        models["teacher"](batch[0])
    return models["main"](batch[0])


def test_models_without_an_optimizer_are_frozen_and_in_eval_mode_during_a_run(make_strategy, plain, pair, batches):
    """During `run` a model without an optimizer config requires no gradient and is in eval mode, all of it."""
    seen = []

    def look(ctx, stage):
        main, teacher = ctx.models["main"], ctx.models["teacher"]
        seen.append(
            (
                main.training,
                [p.requires_grad for p in main.parameters()],
                {module.training for module in teacher.modules()},
                {p.requires_grad for p in teacher.parameters()},
            )
        )

    stages = (S.BEFORE_TRAINING, S.AFTER_FORWARD, S.AFTER_EPOCH, S.AFTER_TRAINING)
    make_strategy(plain(look, *stages), models=pair, training_fn=distill).run(batches[:1])
    assert seen == [(True, [True, True], {False}, {False})] * 4


def test_a_frozen_model_does_not_change(make_strategy, pair, batches):
    """Neither weights nor buffers nor gradients of a frozen model change in a run."""
    before = {key: value.clone() for key, value in pair["teacher"].state_dict().items()}

    def add(models, batch):
        return models["main"](batch[0]) + models["teacher"](batch[0])

    make_strategy(models=pair, training_fn=add).run(batches)
    after = pair["teacher"].state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert all(p.grad is None for p in pair["teacher"].parameters())


def test_modes_are_restored_after_a_run(make_strategy, pair, batches):
    """After `run` every submodule has its own mode back, and every parameter its own requires_grad."""
    modules = [module for model in pair.values() for module in model.modules()]
    parameters = [p for model in pair.values() for p in model.parameters()]
    before = [m.training for m in modules], [p.requires_grad for p in parameters]
    make_strategy(models=pair, training_fn=distill).run(batches)
    assert ([m.training for m in modules], [p.requires_grad for p in parameters]) == before


def test_an_empty_list_of_configs_is_no_optimizer(make_strategy, plain, pair, batches):
    """A model whose list of optimizer configs is empty has no optimizer, so it is frozen and in eval mode."""
    seen = []

    def look(ctx, stage):
        teacher = ctx.models["teacher"]
        seen.append((teacher.training, {p.requires_grad for p in teacher.parameters()}))

    configs = {"main": OptimizerConfig(), "teacher": []}
    strategy = make_strategy(plain(look, S.AFTER_FORWARD), models=pair, training_fn=distill, optimizer_configs=configs)
    strategy.run(batches[:1])
    assert seen == [(False, {False})]


@pytest.mark.parametrize("order", [("whole", "part"), ("part", "whole")])
def test_what_an_optimizer_trains_is_not_frozen_by_another_name(make_strategy, batches, order):
    """A model that is part of a trained one learns with it, though it has a name of its own and no optimizer."""
    part = nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.0))
    named = {"whole": nn.Sequential(part, nn.Linear(1, 1)), "part": part}
    before = part[0].weight.detach().clone()
    strategy = make_strategy(
        models={key: named[key] for key in order},
        optimizer_configs={"whole": OptimizerConfig(optimizer_cls="SGD", optimizer_kwargs={"lr": 0.1})},
        training_fn=lambda models, batch: models["whole"](batch[0]),
    )
    strategy.run(batches)
    assert not torch.equal(part[0].weight, before)


def test_validation_is_in_eval_mode_and_training_goes_on_in_train_mode(make_strategy, plain, batches):
    """Models are in eval mode while they are validated, and each submodule has its own mode back afterwards."""
    model = nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.5))
    model[1].eval()
    seen = []

    def forward(model, batch):
        seen.append((torch.is_grad_enabled(), model.training, model[1].training))
        return model(batch[0])

    strategy = make_strategy(models=model, training_fn=forward, validation=Validation(loader=batches[:1]))
    strategy.validate()
    assert (model.training, model[1].training) == (True, False)
    strategy.run(batches[:1])
    assert seen == [(False, False, False), (True, True, True), (False, False, False)]
    assert (model.training, model[1].training) == (True, False)


def test_training_modes_restores_whatever_raises():
    """`training_modes` gives modes and requires_grad back, also after an error."""
    teacher = block()

    def use():
        with training_modes({"teacher": teacher}, trained=()):
            assert not any(module.training for module in teacher.modules())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        use()
    assert all(module.training for module in teacher.modules())
    assert all(p.requires_grad for p in teacher.parameters())


def test_evaluation_mode_restores_each_submodule():
    """`evaluation_mode` gives every submodule its own mode back, also after an error."""
    model = block()
    model[1].eval()

    def use():
        with evaluation_mode([model]):
            assert not any(module.training for module in model.modules())
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        use()
    assert [module.training for module in model.modules()] == [True, True, False, True]
