"""The states of hooks: by key and not by order, with where they come from, and kept for those who are not there."""

from __future__ import annotations

import warnings

import numpy
import pytest
import torch

from nvalchemi.errors import (
    CheckpointMismatchError,
    CheckpointWarning,
    HookConflictError,
    HookStateMissingError,
    NotPlainDataError,
)
from nvalchemi.training import load_training, save_training
from nvalchemi.training.checkpoint.manifest import read_manifest


class Stateful:
    """A plain hook with state."""

    frequency = 1

    def __init__(self, stage, value=0):
        self.stage, self.value = stage, value

    def __call__(self, ctx, stage):
        self.value += 1

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


@pytest.fixture
def stateful():
    from nvalchemi.training import TrainingStage

    return lambda value=0: Stateful(TrainingStage.AFTER_BATCH, value)


def test_two_hooks_of_one_class_keep_their_own_state_whatever_their_order(make_strategy, kinds, tmp_path):
    """State belongs to a label: the hooks may come in another order, and each gets its own."""
    hooks = {"a": kinds["Counting"](), "b": kinds["Counting"]()}
    hooks["a"].steps, hooks["b"].steps = 3, 5
    save_training(tmp_path, make_strategy(hooks=hooks))
    again = {"b": kinds["Counting"](), "a": kinds["Counting"]()}
    load_training(tmp_path, make_strategy(hooks=again))
    assert (again["a"].steps, again["b"].steps) == (3, 5)


def test_plain_hooks_have_state_too(make_strategy, stateful, tmp_path):
    """A plain hook with state_dict and load_state_dict is saved under its label, or the name of its class."""
    save_training(tmp_path, make_strategy(stateful(4)))
    again = stateful()
    load_training(tmp_path, make_strategy(again))
    assert again.value == 4
    assert "hooks/stateful" in read_manifest(tmp_path).sections


def test_twins_that_cannot_be_told_apart_are_refused_when_they_are_saved(make_strategy, stateful, kinds, tmp_path):
    """Two plain hooks with state and one name are a ValueError that says to give labels; without state they pass."""
    strategy = make_strategy(stateful(), stateful())
    with pytest.raises(HookConflictError, match=r"Two hooks are called 'stateful'.*give them labels"):
        save_training(tmp_path, strategy)
    nothing = kinds["Plain"]
    save_training(tmp_path, make_strategy(nothing(None), nothing(None)))
    assert set(read_manifest(tmp_path).metadata["hooks"]) == {"plain", "plain#2"}


def test_the_manifest_says_where_each_hook_comes_from(make_strategy, kinds, tmp_path):
    """Name, class, distribution and version of every hook stand in the manifest, with state or without."""
    from nvalchemi.metadata import core_version
    from nvalchemi.training.hooks import PassThrough

    save_training(tmp_path, make_strategy(PassThrough(), kinds["Counting"]()))
    hooks = read_manifest(tmp_path).metadata["hooks"]
    assert hooks["pass_through"] == {
        "name": "pass_through",
        "class": "nvalchemi.training.hooks.update:PassThrough",
        "distribution": "nvalchemi-hooks",
        "version": core_version(),
    }
    assert hooks["counting"]["distribution"] is None


def test_a_hook_that_is_not_in_the_file_is_named(make_strategy, kinds, tmp_path, differences):
    """A configured hook without state in the file is an error with its key, what there is, and both remedies."""
    save_training(tmp_path, make_strategy(hooks={"count": kinds["Counting"]()}))
    strategy = make_strategy(hooks={"counts": kinds["Counting"]()})
    before = strategy.state_dict()
    message = (
        r"The hook 'counts' \(Counting, .*has none of it: it holds the states of \['count'\]. Was it called 'count' .*"
    )
    with pytest.raises(HookStateMissingError, match=message + r"Leave the hook out, or .*fresh=\['counts'\]") as caught:
        load_training(tmp_path, strategy)
    assert str(tmp_path) in caught.value.__notes__[0]
    assert differences(strategy.state_dict(), before) == []


def test_a_hook_can_start_from_scratch(make_strategy, make_loader, kinds, tmp_path):
    """`fresh` lets a hook that is new in this run begin with nothing, while all else goes on."""
    first = make_strategy(hooks=[], num_steps=4)
    first.run(make_loader())
    save_training(tmp_path, first)
    counting = kinds["Counting"]()
    strategy = make_strategy(counting, num_steps=3)
    load_training(tmp_path, strategy, fresh=["counting"])
    strategy.run(make_loader())
    assert (strategy.step_count, counting.steps) == (7, 3)
    with pytest.raises(CheckpointMismatchError, match=r"fresh names 'count', but the hooks are \['counting'\]"):
        load_training(tmp_path, strategy, fresh=["count"])


def test_the_state_of_a_hook_that_is_not_there_is_kept_and_saved_again(make_strategy, kinds, tmp_path, make_loader):
    """A run without the hook loads with a warning that says whose state it is, and hands the state on."""
    counting = kinds["Counting"]()
    counting.steps = 11
    save_training(tmp_path / "with", make_strategy(counting))
    without = make_strategy(hooks=[])
    with pytest.warns(
        CheckpointWarning, match=r"'counting' \(.*Counting, no installed.*kept and saved again. To go on"
    ):
        load_training(tmp_path / "with", without)
    without.run(make_loader())
    save_training(tmp_path / "without", without)
    assert read_manifest(tmp_path / "without").metadata["hooks"] == read_manifest(tmp_path / "with").metadata["hooks"]
    again = kinds["Counting"]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_training(tmp_path / "without", make_strategy(again))
    assert again.steps == 11


def test_the_warning_says_what_to_install(make_strategy, kinds):
    """A hook whose distribution is not installed: the distribution and the version that saved it."""
    state = make_strategy(kinds["Counting"]()).state_dict()
    state["hooks"]["counting"] |= {"distribution": "acme-hooks", "version": "2.1"}
    with pytest.warns(CheckpointWarning, match="acme-hooks is not installed here: pip install acme-hooks==2.1"):
        make_strategy(hooks=[]).load_state_dict(state)


def test_a_hook_that_refuses_its_state_leaves_everything_as_it_was(make_strategy, make_loader, kinds, differences):
    """When the second hook refuses, the first gets its own state back, and model and counters never changed."""
    source = make_strategy(hooks={"a": kinds["Counting"](), "b": kinds["Counting"]()})
    source.run(make_loader())
    state = source.state_dict()
    state["hooks"]["b"]["state"]["steps"] = -1
    target = make_strategy(hooks={"a": kinds["Counting"](), "b": kinds["Counting"]()})
    target.setup()
    before = target.state_dict()
    with pytest.raises(ValueError, match="steps is -1") as caught:
        target.load_state_dict(state)
    assert "While loading the state of the hook 'b', saved by" in caught.value.__notes__[0]
    assert differences(target.state_dict(), before) == []


class Picky(torch.nn.Linear):
    """A module that loads in its own way, and refuses a bias above 1 after it took it over."""

    def load_state_dict(self, state, *args, **options):
        super().load_state_dict(state, *args, **options)
        if (self.bias > 1).any():
            raise ValueError("bias above 1")


class PickyOptimizer(torch.optim.SGD):
    """An optimizer that refuses a learning rate above 1 after it took it over."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if self.param_groups[0]["lr"] > 1:
            raise ValueError("lr above 1")


@pytest.mark.parametrize("picky", ["second model", "optimizer"])
def test_a_part_that_refuses_what_was_checked_leaves_everything_as_it_was(make_strategy, kinds, differences, picky):
    """A module or an optimizer with a loading of its own may refuse late: hooks, models and itself go back."""
    from nvalchemi.training import OptimizerConfig

    def make():
        return make_strategy(
            kinds["Counting"](),
            models={"main": torch.nn.Linear(6, 1), "second": Picky(6, 1)},
            training_fn=lambda models, batch: models["main"](batch[0]) + models["second"](batch[0]),
            optimizer_configs={"main": OptimizerConfig(), "second": OptimizerConfig(optimizer_cls=PickyOptimizer)},
        )

    source, target = make(), make()
    batch = torch.ones(4, 6), torch.zeros(4, 1)
    source.train_batch(batch)
    state = source.state_dict()
    if picky == "optimizer":
        state["optimizers"][1]["state"]["param_groups"][0]["lr"] = 2.0
    else:
        state["models"]["second"]["bias"] += 2
    target.setup()
    before = target.state_dict()
    with pytest.raises(ValueError, match="above 1"):
        target.load_state_dict(state)
    assert differences(target.state_dict(), before) == []
    target.load_state_dict(source.state_dict())
    assert differences(target.state_dict(), source.state_dict()) == []


def test_state_that_is_no_plain_data_is_refused_when_it_is_saved(make_strategy, kinds, tmp_path):
    """A numpy scalar in the state of a hook is named with its place, and no file is written."""
    counting = kinds["Counting"]()
    counting.steps = numpy.int64(3)
    with pytest.raises(NotPlainDataError, match=r"hooks/counting\['steps'\] is a int64 .*use .item\(\)"):
        save_training(tmp_path, make_strategy(counting))
    assert list(tmp_path.iterdir()) == []


FOREIGN = {
    "model": ({"models": {"other": torch.nn.Linear(6, 1)}, "optimizer_configs": {"other": None}},
              r"holds the models \['main'\], but the run has \['other'\]; use the same names"),
    "shape": ({"models": torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Identity(), torch.nn.Linear(9, 1))},
              r"main.0.weight is float32 of shape \(8, 6\) in the checkpoint, but float32 of shape \(9, 6\)"),
    "names": ({"models": torch.nn.Linear(6, 1)},
              r"'main' does not fit the Linear: not in the file: weight, bias; not in the model: 0.weight, .* 1 more"),
    "optimizer": ({"optimizer_configs": "SGD"},
                  r"holds the optimizers \['torch.optim.adamw.AdamW'\], but the run has \['torch.optim.sgd.SGD'\]"),
    "scheduler": ({"optimizer_configs": "AdamW"}, r"holds the schedulers \['.*StepLR'\], but the run has \[\]"),
    "groups": ({"optimizer_configs": "groups"}, r"optimizer 0 \(torch.optim.adamw.AdamW\) trains parameters of"),
}  # fmt: skip


@pytest.mark.parametrize("what", FOREIGN)
def test_what_does_not_fit_is_named_before_anything_changes(make_strategy, make_loader, what, differences, tmp_path):
    """Models, shapes, optimizers and schedulers that differ: the message names both sides; nothing is half loaded."""
    from nvalchemi.training import OptimizerConfig

    options, message = FOREIGN[what]
    options = dict(options)
    config = options.get("optimizer_configs")
    split = lambda model: [{"params": [p]} for p in model.parameters()]  # noqa: E731 - used once
    steps = {"scheduler_cls": "StepLR", "scheduler_kwargs": {"step_size": 3}}
    if isinstance(config, str):
        groups = OptimizerConfig(parameters=split, **steps)
        options["optimizer_configs"] = groups if config == "groups" else OptimizerConfig(optimizer_cls=config)
    elif config:
        options["optimizer_configs"] = {"other": OptimizerConfig()}
    source = make_strategy(num_steps=3)
    source.run(make_loader())
    save_training(tmp_path, source)
    target = make_strategy(**options)
    target.setup()
    before = target.state_dict()
    with pytest.raises(CheckpointMismatchError, match=message):
        load_training(tmp_path, target)
    assert differences(target.state_dict(), before) == []
