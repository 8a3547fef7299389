"""Stop, save, load, go on: equal to straight through, also when the precision changes on the way."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch

from nvalchemi.hooks import CheckpointableHook, TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateOrchestrator
from nvalchemi_hooks_loss_scaling import LossScalingHook, MixedPrecisionHook

OPTIONS = {"init_scale": 1024.0, "growth_interval": 3}
HOOKS = {
    "loss_scaling": lambda: LossScalingHook(**OPTIONS),
    "static": lambda: LossScalingHook(scale=64.0),
    "fp16": lambda: MixedPrecisionHook("fp16", **OPTIONS),
    "bf16": lambda: MixedPrecisionHook("bf16"),
    "fp32": lambda: MixedPrecisionHook("fp32"),
}


class Run:
    """A small training; where the loss is scaled, batch 4 of every 7 is infinite."""

    def __init__(self, hook, run_batch):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.hook, self.run_batch = hook, run_batch
        self.update = TrainingUpdateOrchestrator(hook)

    def batches(self, numbers):
        scaler, scales = getattr(self.hook, "scaler", None), []
        for number in numbers:
            data = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
            factor = torch.inf if scaler and number % 7 == 4 else 1.0
            self.run_batch(
                self.update,
                lambda d=data, f=factor: self.model(d).float().square().mean() * f,
                [self.optimizer],
                models={"main": self.model},
            )
            scales.append(scaler.get_scale() if scaler else None)
        return scales

    def save(self):
        buffer = io.BytesIO()
        parts = {"model": self.model, "optimizer": self.optimizer, "update": self.update}
        torch.save({name: part.state_dict() for name, part in parts.items()}, buffer)
        return buffer.getvalue()

    def load(self, data):
        state = torch.load(io.BytesIO(data), weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.update.load_state_dict(state["update"])


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("at", [0, 2, 5])
def test_a_resumed_run_equals_a_straight_one(name, at, run_batch):
    """12 batches equal some, save, load into fresh objects, and the rest: weights and every scale, to the bit."""
    straight = Run(HOOKS[name](), run_batch)
    scales = straight.batches(range(12))
    first = Run(HOOKS[name](), run_batch)
    first.batches(range(at))
    resumed = Run(HOOKS[name](), run_batch)
    resumed.load(first.save())
    assert resumed.batches(range(at, 12)) == scales[at:]
    assert torch.equal(resumed.model.weight, straight.model.weight)
    assert isinstance(straight.hook, CheckpointableHook)


@pytest.mark.parametrize(("before", "after"), [("bf16", "fp16"), ("fp32", "fp16"), ("fp16", "bf16"), ("fp16", "fp32")])
def test_the_precision_may_change_on_resume(before, after, run_batch):
    """Both states load with one warning that names both precisions; weights and optimizer come back, the scale anew."""
    first = Run(HOOKS[before](), run_batch)
    first.batches(range(6))
    resumed = Run(HOOKS[after](), run_batch)
    resumed.batches(range(2, 5))  # what it has counted so far does not stay either
    with pytest.warns(UserWarning, match=f"a run in {before}; this run goes on in {after}") as caught:
        resumed.load(first.save())
    assert len(caught) == 1
    assert torch.equal(resumed.model.weight, first.model.weight)
    for own, saved in zip(resumed.optimizer.state.values(), first.optimizer.state.values(), strict=True):
        assert all(torch.equal(own[key], saved[key]) for key in saved)
    if after == "fp16":
        assert "fresh scale of 1024.0" in str(caught[0].message)
        assert resumed.hook.scaler.state_dict() == MixedPrecisionHook("fp16", **OPTIONS).scaler.state_dict()
    resumed.batches(range(6, 8))


@pytest.mark.parametrize("name", ["loss_scaling", "fp16"])
def test_an_empty_state_warns_and_starts_afresh(name, run_batch):
    """What a disabled scaler saved, an empty state, loads with a warning and a fresh scale."""
    run = Run(HOOKS[name](), run_batch)
    run.batches(range(5))
    with pytest.warns(UserWarning, match=r"fresh scale of 1024\.0"):
        run.hook.load_state_dict({})
    assert run.hook.scaler.get_scale() == 1024.0


@pytest.mark.parametrize("name", ["bf16", "fp32"])
def test_an_empty_state_is_nothing_to_warn_of_where_nothing_is_scaled(name):
    """Without a scale there is none to lose."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HOOKS[name]().load_state_dict({})


def test_the_state_of_another_hook_is_refused():
    """A loss-scaling state given to mixed precision is an error, not a fresh scale in silence."""
    with pytest.raises(ValueError, match="another hook saved it"):
        MixedPrecisionHook("fp16").load_state_dict(LossScalingHook().state_dict())


def test_other_settings_are_refused_and_leave_the_state():
    """A differing growth interval is a ValueError with both values, through either hook, and changes nothing."""
    for make in (LossScalingHook, lambda **options: MixedPrecisionHook("fp16", **options)):
        hook, saved = make(growth_interval=100), make(growth_interval=5).state_dict()
        before = hook.state_dict()
        with pytest.raises(ValueError, match="growth_interval is 5 in the saved state and 100 here"):
            hook.load_state_dict(saved)
        assert hook.state_dict() == before


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda hook: pickle.loads(pickle.dumps(hook))])
@pytest.mark.parametrize("steps", [0, 5])
def test_every_hook_pickles_and_goes_on_equally(name, clone, steps, run_batch):
    """A copy made before or after training takes the same steps as the original, and shares nothing with it."""
    run = Run(HOOKS[name](), run_batch)
    run.batches(range(steps))
    twin = Run(clone(run.hook), run_batch)
    twin.model.load_state_dict(run.model.state_dict())
    twin.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    assert twin.batches(range(steps, 12)) == run.batches(range(steps, 12))
    assert torch.equal(twin.model.weight, run.model.weight)


def test_a_hook_pickles_in_the_middle_of_a_batch():
    """Autocast that is open belongs to this process: the copy has none."""
    hook = MixedPrecisionHook("bf16")
    with TrainContext() as ctx:
        hook(ctx, TrainingStage.BEFORE_BATCH)
        copied = pickle.loads(pickle.dumps(hook))
        copied.close()
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


WORKER = '''
def go_on(hook, windows):
    """Close windows in another process and tell the scales."""
    scales = []
    for found_inf in windows:
        hook.scaler.close(found_inf)
        scales.append(hook.scaler.get_scale())
    return scales, hook.state_dict()
'''


@pytest.mark.parametrize(("name", "steps"), [("loss_scaling", 0), ("fp16", 2)])
def test_a_spawned_worker_goes_on_and_leaves_its_parent_alone(name, steps, run_batch, tmp_path, monkeypatch):
    """In a spawned process the scale goes through the same values, and the parent's count is not touched from there."""
    (tmp_path / "scaling_worker.py").write_text(WORKER)
    monkeypatch.syspath_prepend(tmp_path)
    import scaling_worker

    run = Run(HOOKS[name](), run_batch)
    run.batches(range(steps))
    before, windows = run.hook.state_dict(), [True, False, False]
    with torch.multiprocessing.get_context("spawn").Pool(1) as pool:
        theirs = pool.apply(scaling_worker.go_on, (run.hook, windows))
    assert run.hook.state_dict() == before
    assert scaling_worker.go_on(run.hook, windows) == theirs
