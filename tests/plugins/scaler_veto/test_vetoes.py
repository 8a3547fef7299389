"""What becomes of a step whose gradients are not finite."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nvalchemi.hooks import TrainContext
from nvalchemi.testing import AccumulatingHook, UpdateLoop
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator, UpdatePriority
from nvalchemi_hooks_scaler_veto import GradScalerVetoHook

SCALERS = pytest.mark.parametrize("scaled", [False, True], ids=["no scaler", "torch's scaler"])
BAD = pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])


def scaler_of(scaled, scale=1024.0, **options):
    return torch.amp.GradScaler("cpu", init_scale=scale, **options) if scaled else None


@SCALERS
@BAD
def test_one_inf_vetoes_every_optimizer_and_schedule(zeros, bad, scaled):
    """An inf for the first of two optimizers leaves weights, moments and schedules of both bit for bit."""
    a, b = zeros(2), zeros(1)
    optimizers = [torch.optim.AdamW([p], lr=0.1) for p in (a, b)]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers]
    run = UpdateLoop(GradScalerVetoHook(), optimizers=optimizers, schedulers=schedulers, scaler=scaler_of(scaled))
    run.batch({a: [1.0, 1.0], b: 2.0})
    before = copy.deepcopy([a.data, b.data, *(one.state_dict() for one in optimizers + schedulers)])
    ctx = run.batch({a: [bad, 1.0], b: 2.0})
    after = [a.data, b.data, *(one.state_dict() for one in optimizers + schedulers)]
    torch.testing.assert_close(after, before, rtol=0.0, atol=0.0)
    assert ctx.step_skipped
    assert ctx.outcome.found_inf
    assert ctx.outcome.vetoes == (("scaler_veto", "gradients are not finite"),)
    assert [one.stepped for one in ctx.outcome.optimizers] == [False, False]


@BAD
def test_several_optimizers_with_inf_make_one_back_off(zeros, sgd, bad):
    """However many optimizers hold an inf, the scale is halved once, and the next window is scaled by it."""
    weights = [zeros(1) for _ in range(3)]
    run = UpdateLoop(GradScalerVetoHook(), optimizers=[sgd(w) for w in weights], scaler=scaler_of(True))
    run.batch(dict.fromkeys(weights, bad))
    assert run.scaler.get_scale() == 512.0
    run.batch(dict.fromkeys(weights, 1.0))
    assert [w.item() for w in weights] == [-1.0] * 3
    assert run.scaler.get_scale() == 512.0


@SCALERS
def test_finite_gradients_pass(zeros, sgd, scaled):
    """On finite gradients the hook changes nothing, in the step and in the growth of the scale."""
    plain, checked = zeros(2), zeros(2)
    runs = [
        UpdateLoop(*hooks, optimizers=[sgd(weight)], scaler=scaler_of(scaled, growth_interval=2))
        for hooks, weight in (([], plain), ([GradScalerVetoHook()], checked))
    ]
    for _ in range(3):
        for run, weight in zip(runs, (plain, checked), strict=True):
            run.batch({weight: [3.0, 4.0]})
    torch.testing.assert_close(checked, plain, rtol=0.0, atol=0.0)
    assert not scaled or runs[0].scaler.state_dict() == runs[1].scaler.state_dict()


@SCALERS
def test_the_schedule_waits_for_a_skipped_step(zeros, scaled):
    """With inf on batches 0 and 2 of 4, StepLR(1, 0.5) shows 1, 0.5, 0.5, 0.25, and nobody warns."""
    weight = zeros(1)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    run = UpdateLoop(GradScalerVetoHook(), optimizers=[optimizer], schedulers=[scheduler], scaler=scaler_of(scaled))
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for gradient in (math.inf, 1.0, math.inf, 1.0):
            run.batch({weight: gradient})
            rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 0.5, 0.5, 0.25]


@SCALERS
def test_an_inf_does_not_outlive_its_window(sgd, scaled):
    """One inf on batch 0 of 4 costs one step and one back-off: p goes from 1 to -2, the scale from 1024 to 512."""
    weight = nn.Parameter(torch.ones(1))
    run = UpdateLoop(GradScalerVetoHook(), optimizers=[sgd(weight)], scaler=scaler_of(scaled))
    for gradient in (math.inf, 1.0, 1.0, 1.0):
        run.batch({weight: gradient})
    assert weight.item() == -2.0
    assert run.scaler is None or run.scaler.get_scale() == 512.0


class Watches(TrainingUpdateHook):
    """Notes what it is told, and averages the weight as an average would."""

    reads_grad = False

    def __init__(self):
        self.told, self.skipped = [], []

    def before_optimizer_step(self, ctx, *, will_skip):
        self.told.append(will_skip)
        return True

    def after_optimizer_step(self, ctx, *, skipped):
        self.skipped.append(skipped)


@SCALERS
def test_later_hooks_are_told(zeros, sgd, scaled):
    """A hook that decides after the check sees will_skip, and skipped after the step, on the bad batch alone."""
    weight, watch = zeros(1), Watches()
    run = UpdateLoop(watch, GradScalerVetoHook(), optimizers=[sgd(weight)], scaler=scaler_of(scaled))
    for gradient in (1.0, math.inf, 1.0, 1.0):
        run.batch({weight: gradient})
    assert watch.told == watch.skipped == [False, True, False, False]
    assert run.steps == 3


class TooLarge(TrainingUpdateHook):
    """Vetoes by a norm that is finite."""

    reads_grad = False

    def __init__(self, priority):
        self.priority = priority

    def before_optimizer_step(self, ctx, *, will_skip):
        return float(ctx.grad_norm) < 3.0


@SCALERS
@pytest.mark.parametrize("priority", [5, 22, 45])
def test_another_veto_leaves_the_scale_and_the_next_window_alone(zeros, sgd, priority, scaled):
    """A veto on a finite norm, before or after scaler and check, costs that step and nothing else."""
    weight, hook = zeros(1), GradScalerVetoHook()
    scaler = scaler_of(scaled)
    run = UpdateLoop(hook, TooLarge(priority), optimizers=[sgd(weight)], scaler=scaler)
    run.batch({weight: 1.0})
    state = scaler.state_dict() if scaled else None
    ctx = run.batch({weight: 4.0})
    assert [veto.hook for veto in ctx.outcome.vetoes] == ["too_large"]
    assert not scaled or scaler.state_dict() == state
    run.batch({weight: 1.0})
    assert weight.item() == -2.0
    assert hook.total_skips == 0


@pytest.mark.parametrize("priority", [5, 22, 45])
def test_an_inf_is_found_whoever_vetoes_first(zeros, sgd, priority):
    """An inf makes the scale back off once, also when another hook vetoes the same step before or after."""
    weight, hook = zeros(1), GradScalerVetoHook()
    run = UpdateLoop(hook, TooLarge(priority), optimizers=[sgd(weight)], scaler=scaler_of(True))
    run.batch({weight: math.inf})
    assert run.scaler.get_scale() == 512.0
    assert hook.total_skips == 1


@SCALERS
def test_an_optimizer_without_gradients_is_passed_over(zeros, sgd, scaled):
    """Where the loss reaches one of two optimizers, that one steps and the other stays; with none, nothing fails."""
    a, b, elsewhere = zeros(1), zeros(1), zeros(1)
    hook = GradScalerVetoHook()
    run = UpdateLoop(hook, optimizers=[sgd(b), sgd(a)], scaler=scaler_of(scaled))
    run.batch({a: 1.0})
    assert (a.item(), b.item()) == (-1.0, 0.0)
    assert run.batch({elsewhere: 1.0}).step_skipped
    assert hook.total_skips == 0


@SCALERS
def test_open_windows_are_not_checked(zeros, sgd, scaled):
    """An inf in the first of three batches of a window is found once, when the window is complete."""
    weight, hook = zeros(1), GradScalerVetoHook()
    run = UpdateLoop(AccumulatingHook(every=3), hook, optimizers=[sgd(weight)], scaler=scaler_of(scaled))
    for gradient in (math.inf, 1.0, 1.0):
        assert hook.total_skips == 0
        run.batch({weight: gradient})
    assert (hook.total_skips, hook.consecutive_skips, run.steps) == (1, 1, 0)


@SCALERS
def test_sparse_gradients_are_checked(scaled):
    """An inf among the values of a sparse gradient vetoes."""
    table = nn.Embedding(10, 4, sparse=True)
    run = UpdateLoop(
        GradScalerVetoHook(), optimizers=[torch.optim.SGD(table.parameters(), lr=1.0)], scaler=scaler_of(scaled)
    )
    assert run.batch((table(torch.tensor([1, 1, 2])) * math.inf).sum()).step_skipped
    assert not run.batch(table(torch.tensor([1, 1, 2])).sum()).step_skipped


@pytest.mark.parametrize(
    ("dtype", "element"),
    [(torch.float16, 65504.0), (torch.bfloat16, 3e38), (torch.float32, 3e38), (torch.float32, 1e20)],
)
def test_large_is_not_infinite(zeros, sgd, dtype, element):
    """Gradients whose norm no number of their dtype can hold are finite all the same."""
    weight = zeros(8, dtype=dtype)
    assert not UpdateLoop(GradScalerVetoHook(), optimizers=[sgd(weight)]).batch({weight: element}).step_skipped


def test_true_gradients_are_finite_though_scaled_ones_nearly_overflow(zeros, sgd):
    """Gradients of 1e33 under a scale of 65536 are finite, and so is their step."""
    weight = zeros(8)
    run = UpdateLoop(GradScalerVetoHook(), optimizers=[sgd(weight)], scaler=scaler_of(True, 65536.0))
    assert not run.batch({weight: 1e33}).step_skipped
    assert run.scaler.get_scale() == 65536.0


def test_the_check_comes_between_unscaling_and_clipping():
    """The priority is that of the check, whatever order the hooks are given in."""
    hook, watch = GradScalerVetoHook(), Watches()
    assert hook.priority == UpdatePriority.CHECK_FINITE == 25
    assert list(TrainingUpdateOrchestrator(watch, hook).iter_hooks()) == [hook, watch]


@settings(max_examples=60, deadline=None)
@given(
    elements=st.lists(st.sampled_from([0.0, 1.0, 3e38, math.inf, -math.inf, math.nan]), min_size=1, max_size=6),
    split=st.integers(0, 6),
)
def test_a_step_is_taken_exactly_if_every_element_is_finite(elements, split):
    """Whatever the values and their division among optimizers, any inf or nan holds back all, and nothing else does."""
    parts = [part for part in (elements[:split], elements[split:]) if part]
    weights = [nn.Parameter(torch.zeros(len(part))) for part in parts]
    update = TrainingUpdateOrchestrator(GradScalerVetoHook())
    with TrainContext(optimizers=[torch.optim.SGD([weight], lr=1.0) for weight in weights]) as ctx:
        update(ctx, TrainingStage.BEFORE_BATCH)
        for weight, part in zip(weights, parts, strict=True):
            weight.grad = torch.tensor(part)
        update(ctx, TrainingStage.DO_OPTIMIZER_STEP)
        update(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
    assert ctx.step_skipped is (not all(map(math.isfinite, elements)))
