"""The two recipes of EMAHook's documentation, and what a checkpoint holds of live and averaged weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from nvalchemi.training import (
    EMAHook,
    OptimizerConfig,
    TrainingStrategy,
    create_model_spec,
    load_checkpoint,
    load_training,
    save_checkpoint,
    save_training,
)


@pytest.fixture
def train():
    """Train a small model with some hooks for so many steps."""

    def make(*hooks, steps=5):
        torch.manual_seed(1)
        return TrainingStrategy(
            models=nn.Linear(6, 2), optimizer_configs=OptimizerConfig(optimizer_kwargs={"lr": 0.1}), num_steps=steps,
            loss_fn=lambda predictions, batch: (predictions - 1).square().mean(), hooks=hooks, progress=False,
        )  # fmt: skip

    return make


@pytest.fixture
def batches():
    """Ten batches."""
    return list(torch.randn(10, 4, 6, generator=torch.Generator().manual_seed(2)))


def test_inference_reload(train, batches, tmp_path):
    """Live and averaged module are saved side by side and loaded; an AveragedModel stands around the loaded one."""
    hook = EMAHook(decay=0.9)
    strategy = train(hook)
    strategy.run(batches)
    base = strategy.models["main"]
    spec = create_model_spec(nn.Linear, in_features=6, out_features=2)
    save_checkpoint(tmp_path, models={"main": (base, spec), "main_ema": (hook.get_averaged_model().module, spec)})

    loaded = load_checkpoint(tmp_path)
    main, _ = loaded.models["main"]
    averaged = AveragedModel(loaded.models["main_ema"][0])
    x = torch.ones(1, 6)
    assert torch.equal(main(x), base(x))
    assert torch.equal(averaged(x), hook.get_averaged_model()(x))
    assert not torch.equal(main(x), averaged(x))


def test_resume(train, batches):
    """state_dict and load_state_dict into a fresh hook go on as if nothing had been: 10 steps equal 5 and 5."""
    straight_hook, first_hook, second_hook = (EMAHook(decay=0.9, update_every=2) for _ in range(3))
    straight, first = train(straight_hook, steps=10), train(first_hook)
    straight.run(batches)
    first.run(batches)
    second = train(second_hook)
    second.models["main"].load_state_dict(first.models["main"].state_dict())
    second_hook.load_state_dict(first_hook.state_dict())
    assert second_hook.num_updates == 2
    second.load_state_dict(first.state_dict())
    second.run(batches)
    assert second_hook.num_updates == straight_hook.num_updates == 5
    ends = [hook.get_averaged_model().module.weight for hook in (straight_hook, second_hook)]
    assert torch.equal(*ends)


def test_live_and_averaged_weights_are_both_kept(train, batches, tmp_path):
    """After loading, live weights equal the live ones, averages the averages, and they differ (A3)."""
    hook, again = EMAHook(decay=0.5), EMAHook(decay=0.5)
    strategy = train(hook)
    strategy.run(batches)
    save_training(tmp_path, strategy)
    resumed = train(again)
    load_training(tmp_path, resumed)
    live, average = resumed.models["main"].weight, again.get_averaged_model().module.weight
    assert torch.equal(live, strategy.models["main"].weight)
    assert torch.equal(average, hook.get_averaged_model().module.weight)
    assert not torch.equal(live, average)


@pytest.mark.parametrize("order", [("fast", "slow"), ("slow", "fast")])
def test_two_averages_keep_their_own_state_whatever_their_order(train, batches, tmp_path, order):
    """Two EMA hooks are told apart by their labels, and a state that was taken does not change with later steps."""
    hooks = {"fast": EMAHook(decay=0.2), "slow": EMAHook(decay=0.95)}
    torch.manual_seed(1)
    options = {
        "optimizer_configs": OptimizerConfig(optimizer_kwargs={"lr": 0.1}), "num_steps": 5, "progress": False,
        "loss_fn": lambda predictions, batch: (predictions - 1).square().mean(),
    }  # fmt: skip
    strategy = TrainingStrategy(models=nn.Linear(6, 2), hooks=hooks, **options)
    strategy.run(batches)
    save_training(tmp_path, strategy)
    taken = {key: copy.deepcopy(hook.get_averaged_model().module.weight) for key, hook in hooks.items()}
    strategy.run(batches)
    again = {key: EMAHook(decay=hooks[key].decay) for key in order}
    load_training(tmp_path, TrainingStrategy(models=nn.Linear(6, 2), hooks=again, **options))
    for key, weight in taken.items():
        assert torch.equal(again[key].get_averaged_model().module.weight, weight)
    assert not torch.equal(taken["fast"], taken["slow"])


def test_every_official_hook_is_safe_to_load(train, batches, tmp_path):
    """With all plugins on, after three steps, every file loads with weights_only=True (A42)."""
    strategy = train("ema", "grad_clip", "scaler_veto", {"mixed_precision": {"precision": "fp16"}}, steps=3)
    strategy.run(batches)
    save_training(tmp_path, strategy)
    files = list(tmp_path.rglob("*.pt"))
    assert {"hooks-ema", "hooks-mixed_precision"} <= {path.name.split(".")[1] for path in files}
    for path in files:
        torch.load(path, weights_only=True)


@pytest.mark.parametrize(("saved", "resumed"), [("bf16", "fp16"), ("fp16", "bf16")])
def test_precision_may_change_across_a_resume(train, batches, tmp_path, saved, resumed):
    """Another precision gives a warning and a fresh scale; weights and optimizer state are identical (A32)."""
    strategy = train({"mixed_precision": {"precision": saved}}, steps=3)
    strategy.run(batches)
    save_training(tmp_path, strategy)
    again = train({"mixed_precision": {"precision": resumed}}, steps=6)
    with pytest.warns(UserWarning, match=f"that of a run in {saved}; this run goes on in {resumed}"):
        load_training(tmp_path, again)
    assert torch.equal(again.models["main"].weight, strategy.models["main"].weight)
    moments = [s.optimizers[0].state_dict()["state"][0]["exp_avg"] for s in (strategy, again)]
    assert torch.equal(*moments)
    again.run(batches)


def test_a_plugin_that_is_not_installed_is_named(train, batches, tmp_path, monkeypatch):
    """A checkpoint loads without the plugin of a hook: its state is kept, and the warning says what to install."""
    strategy = train("ema", steps=3)
    strategy.run(batches)
    save_training(tmp_path / "with", strategy)
    monkeypatch.setattr("nvalchemi.training.hook_states.entry_points", lambda: ())
    without = train(steps=3)
    with pytest.warns(
        UserWarning, match=r"nvalchemi-hooks-ema is not installed here: pip install nvalchemi-hooks-ema=="
    ):
        load_training(tmp_path / "with", without)
    save_training(tmp_path / "without", without)
    monkeypatch.undo()
    again = train("ema", steps=3)
    load_training(tmp_path / "without", again)
    averages = [s.orchestrator.state_dict()["ema"]["averaged_model_state"]["module.weight"] for s in (strategy, again)]
    assert torch.equal(*averages)
