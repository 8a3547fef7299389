"""The doubles do what their names say, each time the same."""

from __future__ import annotations

import os
import sys

import importlib_metadata
import pytest
import torch

from nvalchemi.hooks import list_hooks
from nvalchemi.testing import (
    AccumulatingHook,
    FailingHook,
    FakeSite,
    LossFactorHook,
    RecordingHook,
    UpdateLoop,
    VetoingHook,
    tiny_batches,
    tiny_strategy,
)
from nvalchemi.testing.compare import first_difference
from nvalchemi.testing.host_reads import HostReads
from nvalchemi.training import TrainingStage


def weights(strategy):
    return torch.cat([parameter.detach().flatten() for parameter in strategy.models["main"].parameters()])


def test_a_tiny_run_is_the_same_each_time_and_another_for_another_seed():
    """Model, data and random numbers of the run follow from the seeds alone."""
    runs = []
    for seed, data in ((0, 0), (0, 0), (1, 0), (0, 1)):
        torch.rand(7)  # whatever happened before
        strategy = tiny_strategy(seed=seed)
        strategy.run(tiny_batches(seed=data))
        runs.append(weights(strategy))
    assert torch.equal(runs[0], runs[1])
    assert not any(torch.equal(runs[0], other) for other in runs[2:])


def test_tiny_batches_leave_global_random_numbers_alone():
    """Making data does not shift what is drawn afterwards."""
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    tiny_batches()
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_poisoned_batch_has_gradients_that_are_not_finite(value):
    """Only the batch of that number is spoilt, and its gradients with it."""
    strategy = tiny_strategy(VetoingHook(1))
    finite = []
    for batch in tiny_batches(3, poisoned={1: value}):
        strategy.train_batch(batch)
        finite.append(all(p.grad.isfinite().all() for p in strategy.models["main"].parameters()))
    assert finite == [True, False, True]


def test_a_failing_hook_raises_once_at_its_stage():
    """The run stops at the batch and stage it was told, and goes on from there when it is run again."""
    recording = RecordingHook()
    error = KeyError("mine")
    strategy = tiny_strategy(recording, FailingHook(error, stage=TrainingStage.AFTER_LOSS, at=1))
    with pytest.raises(KeyError) as caught:
        strategy.run(tiny_batches(3))
    assert caught.value is error
    assert [stage for _, stage, _ in recording.calls].count("DO_BACKWARD") == 1
    strategy.run(tiny_batches(3))
    assert strategy.step_count == 4


def test_recording_hooks_share_a_record():
    """Two that write into one list show who was called when, and who was told of a veto."""
    calls = []
    early = RecordingHook("early", calls, priority=1, answers={"DO_OPTIMIZER_STEP": False})
    tiny_strategy(RecordingHook("late", calls), early).train_batch(tiny_batches()[0])
    votes = [(label, told) for label, stage, told in calls if stage == "DO_OPTIMIZER_STEP"]
    assert votes == [("early", False), ("late", True)]


def test_a_vetoing_hook_gives_its_reason():
    """Who and why stand in the outcome; without numbers every batch is vetoed."""
    ctx = tiny_strategy(VetoingHook()).train_batch(tiny_batches()[0])
    assert ctx.step_skipped
    assert ctx.outcome.vetoes == (("vetoing", "a test vetoes batch 0"),)


def test_a_loop_steps_on_the_gradients_it_is_given():
    """Real, complex and not finite: with learning rate 1 the weights are the negative gradient."""
    a, b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    loop = UpdateLoop(optimizers=[torch.optim.SGD([a, b], lr=1.0)])
    loop.batch({a: [3.0, torch.inf], b: [1 - 2j]})
    assert (a.tolist(), b.tolist(), loop.steps) == ([-3.0, -torch.inf], [-1 + 2j], 1)


def test_a_loop_scales_with_the_scaler_it_is_given():
    """Gradients arrive scaled and are stepped on unscaled; an inf is one back-off and no step."""
    weight, scaler = torch.nn.Parameter(torch.zeros(1)), torch.amp.GradScaler("cpu", init_scale=8.0)
    loop = UpdateLoop(optimizers=[torch.optim.SGD([weight], lr=1.0)], scaler=scaler)
    assert loop.batch({weight: [torch.nan]}).step_skipped
    loop.batch({weight: [3.0]})
    assert (weight.item(), scaler.get_scale(), loop.steps) == (-3.0, 4.0, 1)


def test_accumulated_gradients_are_summed():
    """Two batches of (1, 2) and a factor of a half move the weight by the mean of the sum."""
    weight = torch.nn.Parameter(torch.zeros(2))
    hooks = (LossFactorHook(0.5), AccumulatingHook(every=2))
    loop = UpdateLoop(*hooks, optimizers=[torch.optim.SGD([weight], lr=1.0)])
    assert loop.batch({weight: [1.0, 2.0]}).step_skipped
    loop.batch({weight: [3.0, 4.0]})
    assert weight.tolist() == [-2.0, -3.0]


def test_an_isolated_site_leaves_everything_as_it_was(tmp_path, monkeypatch):
    """Metadata, path, modules and switches are back when it ends, also after an exception."""
    monkeypatch.setenv("NVALCHEMI_HOOKS_DISABLE", "*")
    before = list_hooks(), list(sys.path), importlib_metadata.distributions

    def goes_wrong():
        with FakeSite(tmp_path).isolated() as site:
            site.add_plugin("acme-hooks", ["one", "two"])
            assert [(hook.name, hook.state) for hook in list_hooks()] == [("one", "available"), ("two", "available")]
            __import__("acme_hooks.plugin")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        goes_wrong()
    assert (list_hooks(), list(sys.path), importlib_metadata.distributions) == before
    assert "acme_hooks.plugin" not in sys.modules
    assert os.environ["NVALCHEMI_HOOKS_DISABLE"] == "*"


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.sum()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.numpy(),
        lambda x: torch.equal(x, x),
        lambda x: x.nonzero(),
        lambda x: float(x.amax()),
    ],
)
def test_whatever_makes_the_host_wait_is_one_read(read):
    """Each way of asking is counted once, with the line that asks."""
    with HostReads() as reads:
        read(torch.ones(3))
    assert len(reads.sites) == 1
    assert "test_doubles.py:" in reads.sites[0]


def test_what_stays_on_the_device_is_no_read():
    """Arithmetic, copies into tensors and choices by a flag cost no wait."""
    x = torch.ones(3)
    with HostReads() as reads:
        torch.where(x.isfinite().all(), x * 2, x).clone().add_(1).norm()
    assert reads.sites == []


@pytest.mark.parametrize(
    ("one", "other", "where"),
    [
        ({"a": 1}, {"a": 1.0}, "state['a']: 1 and 1.0"),
        ({"a": 1}, {"b": 1}, "state: only one of them has ['a', 'b']"),
        ([0, [1, 2]], [0, [1, 3]], "state[1][1]: 2 and 3"),
        (torch.ones(2), torch.ones(2).double(), "state: tensor([1., 1.]) and tensor([1., 1.], dtype=torch.float64)"),
        (torch.zeros(1), torch.tensor([1e-30]), "state: tensor([0.]) and tensor([1.0000e-30])"),
        ((1, 2), (1, 2, 3), "state: (1, 2) and (1, 2, 3)"),
    ],
)
def test_the_first_difference_is_named(one, other, where):
    """Place and both values; types and dtypes count."""
    assert first_difference(one, other) == where


def test_equal_states_differ_nowhere():
    """nan equals nan, and rounding is no difference where it is allowed."""
    state = {"a": [torch.tensor([torch.nan, 1.0]), float("nan"), None, "x"], "b": torch.arange(3)}
    assert first_difference(state, state) == ""
    assert first_difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.000001]), tolerance=1e-5) == ""
    assert first_difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.001]), tolerance=1e-5) != ""
