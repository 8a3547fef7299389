"""Entries 33 to 36: several batches for one step. Entries 10, 20 and 21 are with what they accumulate for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nvalchemi.testing import TinyModel, tiny_batches

WAYS = [
    pytest.param({}, id="plain"),
    pytest.param({"lazy": True}, id="lazy"),
    pytest.param({"options": {"lr": 1.0, "fused": True}}, id="folded"),
    pytest.param({"options": {"lr": 1.0, "fused": True}, "lazy": True}, id="folded, lazy"),
]
SCALES = [pytest.param({}, id="unscaled"), pytest.param({"scale": {"init_scale": 1024.0}}, id="scaled")]


@pytest.mark.fault(naive="DropsTheLastWindow", shows="(-2.5, 1) == (-8.0, 2)")
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("scale", SCALES)
def test_a33_the_last_window_of_a_pass_is_stepped_with_what_it_holds(way, point, how, scale):
    """Six batches in windows of four are two steps, the second with the mean of two.

    Gradients 1 to 6, learning rate 1, from 0: minus the mean of 1, 2, 3, 4 is -2.5, minus that of 5 and 6 is -8.
    """
    run = way(point(w=0.0), accumulate={"steps": 4}, **how, **scale)
    run.epoch([{"w": float(c)} for c in range(1, 7)])
    assert (run.live.w.item(), run.steps) == (-8.0, 2)


def test_a33_a_window_longer_than_the_pass_trains(ours, point):
    """Three batches in a window of 100 are one step with their mean, and the next pass begins a window of its own."""
    run = ours(point(w=0.0), accumulate={"steps": 100}, num_epochs=2)
    run.epoch([{"w": gradient} for gradient in (1.0, 2.0, 3.0)])
    assert (run.live.w.item(), run.steps) == (-4.0, 2)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "4"])
def test_a33_a_window_of_no_batches_is_refused(ours, point, steps):
    """A window has one batch or more; anything else is refused when the hook is built."""
    with pytest.raises(ValueError, match="steps"):
        ours(point(w=0.0), accumulate={"steps": steps})


@pytest.mark.fault(naive="SchedulesEveryMicroBatch", shows="(0.00390625, 2) == (0.25, 2)")
@pytest.mark.parametrize("how", WAYS)
def test_a34_a_scheduler_moves_once_a_window(way, point, how):
    """Eight batches in windows of four are two steps, and a learning rate of 1 halved twice."""
    run = way(point(w=0.0), scheduler=True, accumulate={"steps": 4}, **how)
    for _ in range(8):
        run.step({"w": 1.0})
    assert (run.lr, run.steps) == (0.25, 2)


def test_a34_stopping_inside_a_window_changes_nothing(ours, point, tmp_path):
    """Saved and resumed after any of eight batches, schedule, weights and steps end as those of a straight run."""

    def run():
        return ours(point(w=0.0), scheduler=True, accumulate={"steps": 4})

    def outcome(one):
        return one.lr, one.steps, one.live.w.item()

    gradients = [{"w": float(c)} for c in range(1, 9)]
    straight = run()
    for gradient in gradients:
        straight.step(gradient)
    for stop in range(1, 8):
        first, second = run(), run()
        for gradient in gradients[:stop]:
            first.step(gradient)
        first.save(tmp_path / f"{stop}")
        second.load(tmp_path / f"{stop}")
        for gradient in gradients[stop:]:
            second.step(gradient)
        assert outcome(second) == outcome(straight)


class MeanOfSamples(nn.Module):
    """A weight whose gradient is the mean of those that the samples of a batch ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, batch):
        return (self.w * batch["samples"]).mean()


@pytest.mark.fault(naive="AveragesMeans", shows="-2.0 == -1.0")
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("scale", SCALES)
def test_a35_batches_weigh_what_they_hold(way, how, scale):
    """A window is as one batch of all its samples, however it was cut.

    One sample asks for 4 and three for 0: the mean of all is 1, and that of the means of 4 and 0 would be 2.
    """
    run = way(MeanOfSamples(), accumulate={"steps": 2, "weight": "count"}, **how, **scale)
    for samples in ([4.0], [0.0, 0.0, 0.0]):
        run.step({"samples": torch.tensor(samples), "count": len(samples)})
    assert run.live.w.item() == -1.0


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("cut", [[1, 7], [4, 4], [2, 3, 3], [1] * 8])
def test_a35_however_a_batch_is_cut_the_step_is_the_same(ours, optimizer, cut):
    """Eight samples in one batch, or in windows of unequal parts, give the same weights, but for rounding."""
    x, y = tiny_batches(1)[0]
    ends = [sum(cut[:place]) for place in range(len(cut) + 1)]
    weights = []
    for bounds in ([0, 8], ends):
        torch.manual_seed(0)
        run = ours(
            TinyModel(),
            training_fn=lambda model, batch: model(batch["x"]),
            loss=lambda predictions, batch: (predictions - batch["y"]).square().mean(),
            optimizer=optimizer,
            options={"lr": 0.01},
            accumulate={"steps": len(bounds) - 1, "weight": "count"},
        )
        for _ in range(3):
            for begin, end in zip(bounds, bounds[1:], strict=False):
                run.step({"x": x[begin:end], "y": y[begin:end], "count": end - begin})
        assert run.steps == 3
        weights.append(torch.cat([parameter.detach().flatten() for parameter in run.live.parameters()]))
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


@pytest.mark.fault(
    ours="Accumulated", naive="SilencesTheBackwardPassOnly", shows="[8, 8] == [2, 2]", needs=["grad-accum"]
)
def test_a36_gradients_are_reduced_once_a_window(way, two_ranks):
    """On two ranks two windows of four batches are two reductions; both ranks have the weights of one process.

    Each rank has every second of 16 batches, so a window of four on both is one of eight on one.
    """
    first, second = two_ranks(way.job)
    assert [first["reductions"], second["reductions"]] == [2, 2]
    torch.manual_seed(0)
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for place, (x, y) in enumerate(tiny_batches(16)):
        ((model(x) - y).square().mean() / 8).backward()
        if place % 8 == 7:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        assert torch.equal(first["weights"][name], second["weights"][name])
        torch.testing.assert_close(first["weights"][name], parameter.detach(), rtol=1e-5, atol=1e-6)
