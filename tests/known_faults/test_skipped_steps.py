"""Entries 14 to 18: what a step that is not taken may do to the rest of a run."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook

INF = math.inf
SCALERS = [
    pytest.param({"scale": {"init_scale": 1024.0}}, id="our scaler"),
    pytest.param({"torch_scaler": {"init_scale": 1024.0}}, id="torch's scaler"),
]
WAYS = [
    pytest.param({}, id="plain"),
    pytest.param({"lazy": True}, id="lazy"),
    pytest.param({"options": {"lr": 1.0, "fused": True}}, id="folded"),
    pytest.param({"options": {"lr": 1.0, "fused": True}, "lazy": True}, id="folded, lazy"),
]


@pytest.mark.fault(naive="SchedulesEveryBatch", shows="[0.5, 0.25, 0.125, 0.0625] == [1.0, 0.5, 0.5, 0.25]")
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("scaler", SCALERS)
def test_a14_a_scheduler_moves_only_when_its_optimizer_stepped(way, point, how, check, scaler):
    """The learning rate moves with executed steps only, and nothing warns of a wrong order.

    StepLR(1, 0.5) from 1, an inf in batches 0 and 2 of 4: two steps, so 1, 0.5, 0.5, 0.25 after the four batches.
    """
    run = way(point(w=1.0), scheduler=True, check=check, **scaler, **how)
    rates = []
    with warnings.catch_warnings():
        if way.__name__ == "Run":
            warnings.simplefilter("error")
        else:
            warnings.simplefilter("ignore")
        for gradient in (INF, 1.0, INF, 1.0):
            run.step({"w": gradient})
            rates.append(run.lr)
    assert rates == [1.0, 0.5, 0.5, 0.25]


class Told(TrainingUpdateHook):
    """Notes what it is told after the step."""

    reads_grad = False

    def __init__(self):
        self.skipped = []

    def after_optimizer_step(self, ctx, *, skipped):
        self.skipped.append(skipped)


@pytest.mark.fault(naive="CountsBatchesAsSteps", shows="(4, 4, 4) == (3, 4, 3)")
@pytest.mark.parametrize("how", WAYS)
def test_a15_counters_and_averages_see_executed_steps_only(way, point, how):
    """Steps and batches are counted apart, and the average is that of the steps that were taken.

    Live 0, 1, then 1 (vetoed), 2, 3; decay 0.5: the average is 1, then 1.5, then 2.25.
    """
    run = way(point(w=0.0), ema={"decay": 0.5}, veto=[1], **how)
    for _ in range(4):
        run.step({"w": -1.0})
    assert (run.steps, run.batches, run.updates) == (3, 4, 3)
    assert run.live.w.item() == 3.0
    assert run.shadow.w.item() == 2.25


@pytest.mark.parametrize("how", WAYS)
def test_a15_every_hook_is_called_after_a_skipped_step_and_told(point, ours, how):
    """After the step every hook is called, also when there was none, and told whether there was."""
    told, plain = Told(), []

    class Plain:
        frequency = 1
        stage = TrainingStage.AFTER_OPTIMIZER_STEP

        def __call__(self, ctx, stage):
            plain.append(ctx.step_skipped)

    run = ours(point(w=0.0), veto=[1], hooks=[told, Plain()], **how)
    for _ in range(4):
        run.step({"w": -1.0})
    assert told.skipped == plain == [False, True, False, False]


@pytest.mark.fault(naive="KeepsGradientsAfterASkip", shows="(64.0, 1.0) == (512.0, -2.0)")
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("scaler", SCALERS)
def test_a16_a_skipped_step_leaves_no_gradients_behind(way, point, how, check, scaler):
    """The batch after an overflow begins without gradients: one back-off, and the other three steps are taken.

    Scale 1024, from 1, gradient 1, learning rate 1, an inf in batch 0 of 4: scale 512, and 1 - 3 = -2.
    """
    run = way(point(w=1.0), check=check, **scaler, **how)
    for gradient in (INF, 1.0, 1.0, 1.0):
        run.step({"w": gradient})
    assert (run.scale, run.live.w.item()) == (512.0, -2.0)


class Reads(TrainingUpdateHook):
    """Reads gradients, so that they have to be unscaled before it is called."""

    priority = 35

    def before_optimizer_step(self, ctx, *, will_skip):
        return True


@pytest.mark.fault(naive="ClosesNoWindowAfterAVeto", raises=RuntimeError, shows="unscale_() has already been called")
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("priority", [0, 90])
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("scaler", ["scale", "torch_scaler"])
@pytest.mark.parametrize("hooks", [[], [Reads()]], ids=["nobody reads", "somebody reads"])
def test_a17_a_veto_of_another_hook_closes_the_window_of_the_scaler(way, point, how, priority, check, scaler, hooks):
    """A veto on finite gradients, before the scaler or after it, leaves scale and growth count as they were.

    Growth after two good windows: batches 0 and 2 are good and batch 1 is vetoed, so the scale doubles after batch 2.
    """
    settings = {scaler: {"init_scale": 8.0, "growth_interval": 2}}
    run = way(point(w=1.0), check=check, veto=[1], veto_priority=priority, hooks=hooks, **settings, **how)
    seen = []
    for _ in range(3):
        run.step({"w": 1.0})
        seen.append((run.scale, run.live.w.item()))
    assert seen == [(8.0, 0.0), (8.0, 0.0), (16.0, -1.0)]


@pytest.mark.parametrize("scaler", ["scale", "torch_scaler"])
@pytest.mark.parametrize("priority", [0, 90])
def test_a17_an_overflow_backs_off_once_whoever_else_vetoes(point, ours, scaler, priority):
    """An inf beside another veto is one back-off, with several optimizers too."""
    run = ours(point(v=1.0, w=1.0), spread="optimizers", check=True, veto=[0], veto_priority=priority,
               **{scaler: {"init_scale": 1024.0}})  # fmt: skip
    run.step({"v": INF, "w": INF})
    run.step({"v": 1.0, "w": 1.0})
    assert (run.scale, run.live.v.item(), run.live.w.item()) == (512.0, 0.0, 0.0)


@pytest.mark.fault(naive="StepsWithoutGradients", shows="No inf checks were recorded")
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("scaler", SCALERS)
def test_a18_an_optimizer_that_the_loss_does_not_reach_is_skipped_quietly(way, point, how, check, scaler):
    """The optimizer with gradients steps, and the one without stays as it is, bit for bit."""
    run = way(point(v=1.0, w=0.1), spread="optimizers", check=check, **scaler, **how)
    run.step({"v": 1.0})
    assert run.live.v.item() == 0.0
    assert torch.equal(run.live.w, torch.tensor(0.1))
    assert not run.optimizers[1].state


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("bad", range(4))
def test_a16_an_overflow_anywhere_in_a_window_costs_that_window_alone(point, ours, how, scaler, check, bad):
    """An inf in any of four micro-batches is one back-off, and the next window is stepped with its own mean."""
    run = ours(point(w=1.0), check=check, accumulate={"steps": 4}, **scaler, **how)
    for place in range(4):
        run.step({"w": INF if place == bad else 1.0})
    for _ in range(4):
        run.step({"w": 0.5})
    assert (run.scale, run.live.w.item(), run.steps) == (512.0, 0.5, 1)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("scaler", SCALERS)
def test_a17_a_veto_at_the_end_of_a_window_loses_that_window_alone(point, ours, how, scaler):
    """A window whose step is vetoed is not added to the next, and the scale stays."""
    run = ours(point(w=1.0), accumulate={"steps": 2}, veto=[1], **scaler, **how)
    for gradient in (1.0, 1.0, 0.25, 0.25):
        run.step({"w": gradient})
    assert (run.scale, run.live.w.item(), run.steps) == (1024.0, 0.75, 1)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize("check", [True, False])
def test_a18_a_batch_that_reaches_no_optimizer_is_a_skipped_step(point, ours, how, scaler, check):
    """Where no optimizer has a gradient the scale stays, nothing raises, and the next batch trains."""
    run = ours(point(v=1.0, w=1.0), spread="first", check=check, ema={"decay": 0.5}, **scaler, **how)
    assert run.step({"w": 1.0}).step_skipped
    run.step({"v": 0.5, "w": 1.0})
    assert (run.scale, run.live.v.item(), run.steps, run.updates) == (1024.0, 0.5, 1, 1)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("check", [True, False])
def test_a18_one_optimizer_overflows_and_the_other_has_no_gradients(point, ours, how, check):
    """An inf in one optimizer, while the other has nothing, is one back-off and no step."""
    run = ours(point(v=1.0, w=1.0), spread="optimizers", check=check, scale={"init_scale": 1024.0}, **how)
    assert run.step({"v": INF}).step_skipped
    assert (run.scale, run.live.v.item(), run.live.w.item()) == (512.0, 1.0, 1.0)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    events=st.lists(st.sampled_from(["step", "inf", "veto", "both"]), max_size=10),
    scaler=st.sampled_from(["scale", "torch_scaler"]),
    check=st.booleans(),
    lazy=st.booleans(),
    folded=st.booleans(),
    priority=st.sampled_from([0, 90]),
    hooks=st.sampled_from([(), (Reads(),)]),
)
def test_a17_scale_and_weights_follow_from_events(point, ours, events, scaler, check, lazy, folded, priority, hooks):
    """In any sequence an inf backs off, a good window counts for growth, a veto on finite gradients does neither."""
    vetoed = [place for place, event in enumerate(events) if event in ("veto", "both")]
    scaling = {scaler: {"init_scale": 64.0, "growth_interval": 2}}
    how = {"check": check, "veto": vetoed, "veto_priority": priority, "lazy": lazy, "hooks": hooks, **scaling}
    run = ours(point(w=0.0), options={"lr": 1.0, "fused": folded}, **how)
    scale, good, steps = 64.0, 0, 0
    for event in events:
        run.step({"w": INF if event in ("inf", "both") else -1.0})
        if event in ("inf", "both"):
            scale, good = scale / 2, 0
        elif event == "step":
            steps, good = steps + 1, good + 1
        if good == 2:
            scale, good = scale * 2, 0
    if events:
        assert (run.scale, run.steps, run.live.w.item()) == (scale, steps, float(steps))
