"""The figures on the page about numerics are those that come out here."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "numerics.md"
ROW = re.compile(r"^\| (?P<what>[^|]+?) \| (?P<most>at most )?(?P<figure>\d[-+.\de]*) \|$", flags=re.M)
ON_PAGE = {row["what"]: row for row in ROW.finditer(PAGE.read_text(encoding="utf-8").partition("## Figures")[2])}
FIGURES = {}


def figure(what):
    """Name the row that a function recomputes."""

    def note(compute):
        FIGURES[what] = compute
        return compute

    return note


@pytest.mark.parametrize("what", sorted({*ON_PAGE}))
def test_a_figure_on_the_page_is_what_comes_out(what, ours, point):
    """Every figure on the page is recomputed; a bound holds, and is not more than 50 times what is measured."""
    value, said = FIGURES[what](ours, point), float(ON_PAGE[what]["figure"])
    if ON_PAGE[what]["most"]:
        assert value <= said
        assert value == 0 or value >= said / 50
    else:
        assert value == pytest.approx(said, rel=1e-3)


def test_every_figure_that_is_computed_is_on_the_page():
    """The page and this file have the same figures."""
    assert set(FIGURES) == set(ON_PAGE)


def averaged(ours, point, dtype):
    """A weight that was 1 at first and 2 for 1000 updates, averaged at a decay of 0.999."""
    run = ours(point(w=torch.ones((), dtype=dtype)), ema={"decay": 0.999})
    for gradient in [0.0, -1.0] + [0.0] * 999:
        run.step({"w": gradient})
    return run


def lerped(dtype):
    """The same average, kept in the dtype itself."""
    average, live = torch.ones((), dtype=dtype), torch.full((), 2.0, dtype=dtype)
    for _ in range(1000):
        average.lerp_(live, 1 - 0.999)
    return average.item()


@figure("average of 1, then 1000 times 2, at a decay of 0.999, weights in bfloat16")
def average_of_bf16(ours, point):
    return averaged(ours, point, torch.bfloat16).shadow.w.item()


@figure("the same, weights in float16")
def average_of_fp16(ours, point):
    return averaged(ours, point, torch.float16).shadow.w.item()


@figure("its float32 accumulator, relative error")
def error_of_accumulator(ours, point):
    state = averaged(ours, point, torch.bfloat16).hook("ema").state_dict()
    return abs(state["accumulators"]["w"].item() / (2 - 0.999**1000) - 1)


@figure("the same average kept in bfloat16, which never moves")
def average_in_bf16(ours, point):
    return lerped(torch.bfloat16)


@figure("the same average kept in float16, which drifts")
def average_in_fp16(ours, point):
    return lerped(torch.float16)


@figure("norm of two float16 gradients of 60000, above the largest float16")
def norm_above_fp16(ours, point):
    run = ours(point(w=torch.zeros(2, dtype=torch.float16)), clip={})
    run.step({"w": [60000.0, 60000.0]})
    return run.norm_before_clipping


@figure("norm of two float32 gradients of 1e30, whose squares are above the largest float32")
def norm_above_the_squares(ours, point):
    run = ours(point(w=[0.0, 0.0]), clip={})
    run.step({"w": [1e30, 1e30]})
    return run.norm_before_clipping


@figure("norm of a million gradients, relative error")
def error_of_norm(ours, point):
    gradients = torch.randn(10**6, generator=torch.Generator().manual_seed(0))
    run = ours(point(w=torch.zeros(10**6)), clip={})
    run.step({"w": gradients})
    return abs(run.norm_before_clipping / gradients.double().norm().item() - 1)


@figure("gradients (3, 4) clipped to 1: how much their norm differs from 1")
def error_of_clipping(ours, point):
    run = ours(point(w=[0.0, 0.0]), clip={"max_norm": 1.0})
    run.step({"w": [3.0, 4.0]})
    return abs(run.live.w.detach().double().norm().item() - 1)


def scaled(ours, point, scale):
    """Gradients as they arrive at the optimizer under a loss scale, and without one."""
    gradients = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    run = ours(point(w=torch.zeros(1000)), scale={"scale": scale})
    run.step({"w": gradients})
    return -run.live.w.detach(), gradients


@figure("gradients, of 1000, that a loss scale of 65536 changes in any bit")
def changed_by_a_power_of_two(ours, point):
    arrived, gradients = scaled(ours, point, 65536.0)
    return int((arrived != gradients).sum())


@figure("gradients under a loss scale of 1000, largest relative change")
def changed_by_another_scale(ours, point):
    arrived, gradients = scaled(ours, point, 1000.0)
    return ((arrived - gradients) / gradients).abs().max().item()


class Small(nn.Module):
    """A weight in float32 whose gradient passes through float16."""

    def __init__(self, gradient: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.gradient = gradient

    def forward(self, batch):
        return (self.w.half() * 1.0).float() * self.gradient


@figure("a gradient of 1e-8 that passes through float16 unscaled")
def vanished(ours, point):
    run = ours(Small(1e-8))
    run.step(0)
    return abs(run.live.w.item())


@figure("the same under a loss scale of 65536, relative error")
def kept(ours, point):
    run = ours(Small(1e-8), scale={"scale": 65536.0})
    run.step(0)
    return abs(-run.live.w.item() / 1e-8 - 1)


@figure("windows of nan in a row that bring a loss scale from 65536 to its floor")
def windows_to_the_floor(ours, point):
    run, scales = ours(point(w=1.0), scale={}), []
    for _ in range(100):
        scales.append(run.scale)
        run.step({"w": math.nan})
    return scales.index(run.scale)


@figure("that floor")
def floor(ours, point):
    run = ours(point(w=1.0), scale={})
    for _ in range(200):
        run.step({"w": math.nan})
    return run.scale


@figure("a gradient of a window of 1, 2 and 5 samples, relative difference from one batch of 8")
def cut_into_windows(ours, point):
    samples = torch.randn(8, generator=torch.Generator().manual_seed(0)) + 2
    run = ours(
        point(w=0.0),
        accumulate={"steps": 3, "weight": "count"},
        loss=lambda y, batch: y,
        training_fn=lambda model, batch: model({"w": batch["samples"].mean()}),
    )
    for part in samples.split([1, 2, 5]):
        run.step({"samples": part, "count": len(part)})
    return abs(-run.live.w.item() / samples.mean().item() - 1)
