"""One process trains as without the hooks, and set-ups that contradict themselves are refused by name."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nvalchemi.errors import HookConflictError
from nvalchemi.hooks import PreparesLoader
from nvalchemi.testing import tiny_batches, tiny_strategy
from nvalchemi.training import OptimizerConfig, TrainingStage, TrainingStrategy
from nvalchemi_hooks_distributed import DDPHook, FSDPHook
from nvalchemi_hooks_distributed import spreading as spreading_module

HOOKS = [DDPHook, FSDPHook]


@pytest.fixture
def group(tmp_path):
    """A process group of this process alone."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def two(monkeypatch, group):
    """The hooks believe that there are two ranks."""
    monkeypatch.setattr(spreading_module, "ranks", lambda: 2)


@pytest.mark.parametrize("hook", HOOKS)
def test_one_process_trains_as_without(hook):
    """Alone, models stay what they are, loaders too, and no group is made."""
    strategy, batches = tiny_strategy(spread := hook()), tiny_batches(3)
    alone = tiny_strategy()
    strategy.run(batches)
    alone.run(batches)
    for one, other in zip(strategy.models["main"].parameters(), alone.models["main"].parameters(), strict=True):
        assert torch.equal(one, other)
    assert type(strategy.models["main"]) is type(alone.models["main"])
    assert isinstance(spread, PreparesLoader)
    assert spread.prepare_loader(batches, training=True) is batches
    assert not distributed.is_initialized()


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_pickles_with_its_settings(hook):
    """Settings are data, and travel to another process."""
    options = {"models": "main", "timeout": 5.0, **({"shard": ["Linear"]} if hook is FSDPHook else {})}
    again = pickle.loads(pickle.dumps(hook(**options)))
    assert vars(again) == vars(hook(**options))


@pytest.mark.parametrize("hook", HOOKS)
def test_a_model_that_is_not_there_is_named(hook):
    """A wrong name is found with one process too."""
    with pytest.raises(HookConflictError, match=r"there is no model 'teacher', only \['main'\]"):
        tiny_strategy(hook(models="teacher")).setup()


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"WORLD_SIZE": "2"}, "RANK, MASTER_ADDR, MASTER_PORT is not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
    ],
)
def test_an_environment_that_says_half_is_refused(monkeypatch, told, said):
    """Where there are to be others, but nobody says where, the message names what is missing, and torchrun."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(HookConflictError, match=said):
        tiny_strategy(DDPHook()).setup()


@pytest.mark.parametrize("hook", HOOKS)
def test_a_model_that_is_spread_already_is_refused(two, hook):
    """A wrapped model, and a sharded one, are named with what they are."""
    from torch.distributed.fsdp import fully_shard

    for model, said in (
        (nn.parallel.DistributedDataParallel(nn.Linear(2, 1)), "is a DistributedDataParallel already"),
        (fully_shard(nn.Linear(2, 1)), "is sharded already"),
    ):
        with pytest.raises(HookConflictError, match=rf"models\['main'\] {said}"):
            strategy_of(model, hook()).setup()


@pytest.mark.parametrize("hook", HOOKS)
def test_a_model_without_anything_to_train_is_refused(two, hook):
    """There would be nothing to reduce."""
    with pytest.raises(HookConflictError, match="no parameter that is trained"):
        strategy_of(nn.Linear(2, 1).requires_grad_(False), hook()).setup()


def test_models_without_an_optimizer_are_left_alone(two):
    """A frozen teacher is neither wrapped nor asked to reduce anything."""
    models = {"main": nn.Linear(2, 1), "teacher": nn.Linear(2, 1)}
    strategy = strategy_of(models, DDPHook(), optimizer_configs={"main": OptimizerConfig()})
    strategy.setup()
    kinds = {name: type(model).__name__ for name, model in strategy.models.items()}
    assert kinds == {"main": "DistributedDataParallel", "teacher": "Linear"}


@pytest.mark.parametrize("model", [nn.Linear(2, 1), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))])
def test_buffers_are_sent_unless_told_otherwise(two, model):
    """`sync_buffers` decides, under whichever name torch knows it."""
    for wanted in (True, False):
        strategy = strategy_of(copy.deepcopy(model), DDPHook(sync_buffers=wanted))
        strategy.setup()
        sends = bool(strategy.models["main"].will_sync_module_buffers())
        assert sends is (wanted and bool(list(model.buffers())))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shard": ["Conv2d"]}, r"no child of the class 'Conv2d', only of Linear, Tanh"),
        ({"mesh": (2, 2)}, "has 4 places, but there are 1 ranks"),
    ],
)
def test_what_cannot_be_sharded_so_is_named(two, options, said):
    """A class that is not there, and a mesh of another size, are refused with what there is."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    with pytest.raises(HookConflictError, match=said):
        strategy_of(model, FSDPHook(**options)).setup()


def test_children_are_sharded_by_themselves(two):
    """Names of classes, or a function of name and module, choose what is gathered by itself."""
    for shard in (["Linear"], lambda name, module: isinstance(module, nn.Linear)):
        strategy = strategy_of(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)), FSDPHook(shard=shard))
        strategy.setup()
        sharded = [name for name, m in strategy.models["main"].named_modules() if type(m).__name__.startswith("FSDP")]
        assert sharded == ["", "0", "2"]


@pytest.mark.parametrize(
    ("hook", "options", "said"),
    [
        (DDPHook, {"timeout": 0}, "give the seconds"),
        (FSDPHook, {"shard": "Linear"}, r"\['Linear'\]"),
        (FSDPHook, {"mesh": (2,)}, "give two numbers"),
        (FSDPHook, {"param_dtype": "int8"}, "give the name of a floating dtype"),
    ],
)
def test_wrong_settings_are_refused_at_once(hook, options, said):
    """Each with its value, and what to give instead."""
    with pytest.raises((ValueError, TypeError), match=said):
        hook(**options)


def strategy_of(models, hook, optimizer_configs=None):
    return TrainingStrategy(
        models=models,
        optimizer_configs=optimizer_configs or OptimizerConfig(),
        loss_fn=lambda y, batch: y.square().mean(),
        num_steps=1,
        hooks=[hook],
    )


def test_a_model_that_is_sharded_over_one_rank_has_a_norm_at_any_time(group):
    """Where torchrun starts one process, the norm of a sharded model takes no message, and a plain hook may ask."""

    class Curious:
        frequency, stage = 1, TrainingStage.BEFORE_OPTIMIZER_STEP

        def __call__(self, ctx, stage):
            self.norm = float(ctx.grad_norm)

    model = fully_shard(nn.Linear(3, 1, bias=False), mesh=init_device_mesh("cpu", (1,)))
    TrainingStrategy(
        models=model, optimizer_configs=OptimizerConfig(), num_steps=1, progress=False, hooks=[curious := Curious()],
        loss_fn=lambda predictions, batch: predictions.sum(),
    ).run([torch.tensor([[1.0, 2.0, 2.0]])])  # fmt: skip
    assert curious.norm == 3.0
