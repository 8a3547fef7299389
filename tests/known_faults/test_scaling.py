"""Entries 28 to 32: the scale of a loss over a whole run, and the precisions that need one."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

from nvalchemi.errors import NonFiniteGradientError

WAYS = [
    pytest.param({}, id="plain"),
    pytest.param({"lazy": True}, id="lazy"),
    pytest.param({"options": {"lr": 1.0, "fused": True}}, id="folded"),
    pytest.param({"options": {"lr": 1.0, "fused": True}, "lazy": True}, id="folded, lazy"),
]


@pytest.mark.fault(naive="LosesTheGrowthCount", shows="[8.0, 8.0, 16.0, 16.0] == [16.0, 16.0, 16.0, 32.0]")
@pytest.mark.parametrize("how", WAYS)
def test_a28_a_resumed_scale_grows_when_it_would_have(way, point, how, tmp_path):
    """Scale and growth count go on from a checkpoint as if the run had not been stopped.

    From 8, growth after 3 good windows: 8, 8, 16, 16, 16, 32. Stopped after two, the rest is 16, 16, 16, 32.
    """
    settings = {"scale": {"init_scale": 8.0, "growth_interval": 3}, **how}
    run, scales = way(point(w=0.0), **settings), []
    for _ in range(2):
        run.step({"w": 1.0})
        scales.append(run.scale)
    run.save(tmp_path / "saved")
    run, resumed = way(point(w=0.0), **settings), []
    run.load(tmp_path / "saved")
    for _ in range(4):
        run.step({"w": 1.0})
        resumed.append(run.scale)
    assert scales == [8.0, 8.0]
    assert resumed == [16.0, 16.0, 16.0, 32.0]


@pytest.mark.fault(naive="BacksOffForEver", shows="0.0 > 0", careful=False)
@pytest.mark.parametrize("how", WAYS)
def test_a29_a_scale_has_a_floor_from_which_it_recovers(way, point, how):
    """After 200 windows of nan the scale is above 0, and the first finite gradient is the true one.

    Halved without an end, 65536 = 2**16 is 0 after 166 windows, for the smallest float32 is 2**-149.
    """
    run = way(point(w=1.0), scale={"init_scale": 65536.0}, **how)
    for _ in range(200):
        run.step({"w": math.nan})
    assert run.scale > 0
    run.step({"w": 0.25})
    assert run.live.w.item() == 0.75


@pytest.mark.parametrize("how", WAYS)
def test_a29_a_run_that_only_skips_is_stopped(point, ours, how):
    """After as many windows in a row as the hook allows, the error names the scale and the parameter to look at."""
    run = ours(point(v=1.0, w=1.0), scale={"init_scale": 65536.0}, check={"max_consecutive_skips": 5}, **how)
    for _ in range(4):
        run.step({"v": 1.0, "w": math.nan})
    with pytest.raises(NonFiniteGradientError, match=r"'w'.*loss scale is now 2048"):
        run.step({"v": 1.0, "w": math.nan})
    assert (run.steps, run.scale) == (0, 2048.0)


@pytest.mark.parametrize("how", WAYS)
def test_a29_a_scale_has_a_ceiling(point, ours, how):
    """A scale that doubles with every window stops where it was told to."""
    run = ours(point(w=1.0), scale={"init_scale": 2.0**30, "growth_interval": 1, "max_scale": 2.0**32}, **how)
    for _ in range(100):
        run.step({"w": 0.0})
    assert run.scale == 2.0**32


class Net(nn.Module):
    """A linear layer, so that autocast has something to cast, which counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.layer.weight)
        self.forwards = 0

    def forward(self, x):
        self.forwards += 1
        self.dtype = (y := self.layer(x)).dtype
        return y.float().sum()


@pytest.mark.fault(naive="ScalesWhereverThereIsAutocast", shows="[65536.0] == [1.0]")
@pytest.mark.parametrize("how", WAYS)
def test_a30_bf16_is_autocast_and_no_scale(way, how):
    """In bf16 the loss given to the backward pass is the raw one: the gradient arrives as it is."""
    model, arrived = Net(), []
    model.layer.weight.register_hook(lambda gradient: arrived.append(gradient.item()))
    run = way(model, precision="bf16", **how)
    run.step(torch.ones(1, 1))
    assert model.dtype is torch.bfloat16
    assert arrived == [1.0]
    assert run.live.layer.weight.item() == 0.0


def test_a30_a_run_in_bf16_keeps_no_scaler(ours):
    """Nothing in the state of a run in bf16 is a scale, and contradictions are refused before anything is trained."""
    run = ours(Net(), precision="bf16")
    run.step(torch.ones(1, 1))
    assert run.strategy.state_dict()["hooks"]["mixed_precision"]["state"] == {"precision": "bf16"}
    with pytest.raises(ValueError, match="bf16"):
        ours(Net(), hooks=[{"mixed_precision": {"precision": "bf16", "init_scale": 8.0}}])
    with pytest.raises(ValueError, match="loss_scaling"):
        ours(Net(), precision="bf16", scale={})


@pytest.mark.fault(naive="FindsHalfParametersAtTheFirstStep", shows="1 == 0", careful=False)
@pytest.mark.parametrize("scaling", [{"scale": {}}, {"precision": "fp16"}], ids=["scaled", "fp16"])
def test_a31_fp16_parameters_under_a_scale_are_refused_before_the_first_batch(way, scaling):
    """One fp16 parameter among others is named before anything is computed."""
    model = Net()
    model.other = nn.Linear(1, 1).half()
    run = way(model, loss=lambda predictions, batch: predictions + model.other.weight.float().sum(), **scaling)
    with pytest.raises(ValueError, match="(?i)fp16") as refused:
        run.step(torch.ones(1, 1))
    assert model.forwards == 0
    assert "'other.weight'" in str(refused.value)


@pytest.mark.fault(naive="RestoresAnEmptyScaler", raises=RuntimeError, shows="source state dict is empty")
@pytest.mark.parametrize(("saved", "resumed"), [("bf16", "fp16"), ("fp16", "bf16"), ("fp32", "fp16")])
@pytest.mark.parametrize(("optimizer", "options"), [("SGD", {"lr": 0.5, "momentum": 0.9}), ("AdamW", {"lr": 0.5})])
def test_a32_precision_may_change_when_a_run_is_resumed(way, tmp_path, saved, resumed, optimizer, options):
    """A run in another precision takes over weights and optimizer states, bit for bit, and trains on."""
    first = way(Net(), optimizer=optimizer, options=options, precision=saved)
    for _ in range(3):
        first.step(torch.ones(1, 1))
    first.save(tmp_path / "saved")
    second = way(Net(), optimizer=optimizer, options=options, precision=resumed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        second.load(tmp_path / "saved")
    assert torch.equal(first.live.layer.weight, second.live.layer.weight)
    states = [run.optimizers[0].state_dict()["state"] for run in (first, second)]
    assert str(states[0]) == str(states[1])
    for _ in range(2):  # a fresh scale of 65536 overflows once: fp16 ends at 65504
        second.step(torch.ones(1, 1))
    assert not torch.equal(first.live.layer.weight, second.live.layer.weight)


def test_a32_a_change_of_precision_is_said(ours, tmp_path):
    """The warning names both precisions and the scale from which fp16 begins."""
    first, second = ours(Net(), precision="bf16"), ours(Net(), precision="fp16")
    first.step(torch.ones(1, 1))
    first.save(tmp_path / "saved")
    with pytest.warns(UserWarning, match=r"bf16.*fp16.*65536"):
        second.load(tmp_path / "saved")
    second.strategy.setup()
    assert second.scale == 65536.0
