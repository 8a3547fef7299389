"""What clipping does with gradients whose norm is not finite."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn

from nvalchemi.errors import NonFiniteGradientError
from nvalchemi.testing import UpdateLoop
from nvalchemi.training.hooks import TrainingUpdateHook
from nvalchemi_hooks_grad_clip import GradientClipHook

SCALERS = pytest.mark.parametrize("scaled", [False, True], ids=["no scaler", "torch's scaler"])
BAD = pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
WAYS = pytest.mark.parametrize(
    "options", [{}, {"per_optimizer": True}, {"clip_value": 0.5}, {"norm_type": math.inf}, {"max_norm": math.inf}]
)


def scaler_of(scaled, scale=1024.0):
    return torch.amp.GradScaler("cpu", init_scale=scale) if scaled else None


@SCALERS
@BAD
@WAYS
def test_a_norm_that_is_not_finite_vetoes_every_optimizer(zeros, bad, scaled, options):
    """With gradients (inf, 1) and (2) in two optimizers no parameter, moment or schedule moves, however one clips."""
    a, b = zeros(2), zeros(1)
    optimizers = [torch.optim.AdamW([p], lr=0.1) for p in (a, b)]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers]
    hook = GradientClipHook(**options)
    run = UpdateLoop(hook, optimizers=optimizers, schedulers=schedulers, scaler=scaler_of(scaled))
    run.batch({a: [1.0, 1.0], b: 2.0})
    before = copy.deepcopy([a.data, b.data, *(o.state_dict() for o in optimizers)])
    ctx = run.batch({a: [bad, 1.0], b: 2.0})
    after = [a.data, b.data, *(o.state_dict() for o in optimizers)]
    torch.testing.assert_close(after, before, rtol=0.0, atol=0.0)
    assert ctx.step_skipped
    assert ctx.outcome.found_inf
    assert [veto.hook for veto in ctx.outcome.vetoes] == [hook.state_key]
    assert "not finite" in ctx.outcome.vetoes[0].reason
    assert not math.isfinite(hook.last_norm)
    assert run.scaler is None or run.scaler.get_scale() == 512.0
    assert a.grad[1].item() in (1.0, 1024.0), "neither divided to zero nor cut"
    assert not a.grad[0].isfinite(), "the culprit was hidden"


@SCALERS
def test_a_norm_that_overflows_vetoes_with_one_back_off(zeros, sgd, scaled):
    """Finite gradients of 1e20, whose squares overflow float32, are vetoed, and the scale backs off once."""
    for hook in (GradientClipHook(), GradientClipHook(per_optimizer=True), GradientClipHook(max_norm=math.inf)):
        a, b = zeros(2), zeros(1)
        run = UpdateLoop(hook, optimizers=[sgd(a), sgd(b)], scaler=scaler_of(scaled))
        ctx = run.batch({a: 1e20, b: 1.0})
        assert ctx.step_skipped
        assert ctx.outcome.found_inf
        assert a.tolist() == [0.0, 0.0]
        assert hook.last_norm == pytest.approx(math.sqrt(2) * 1e20)
        assert run.scaler is None or run.scaler.get_scale() == 512.0
        run.batch({a: 1.0, b: 1.0})
        assert run.steps == 1


def test_orders_that_do_not_square_overflow_later(zeros, sgd):
    """Gradients of 1e20 are clipped by their sum or their maximum, which float32 holds."""
    for norm_type in (1.0, math.inf):
        weight = zeros(2)
        run = UpdateLoop(GradientClipHook(norm_type=norm_type), optimizers=[sgd(weight)])
        assert not run.batch({weight: 1e20}).step_skipped
        assert torch.linalg.vector_norm(weight.detach(), norm_type).item() == pytest.approx(1.0)


def test_doubles_overflow_at_their_own_limit(zeros, sgd):
    """Double gradients of 1e20 are clipped, those of 1e200 are vetoed."""
    weight = zeros(2, dtype=torch.float64)
    run = UpdateLoop(GradientClipHook(), optimizers=[sgd(weight)])
    assert not run.batch({weight: 1e20}).step_skipped
    assert run.batch({weight: 1e200}).step_skipped


def test_a_tiny_threshold_gives_no_silent_zero_step(zeros, sgd):
    """Where the divisor itself would overflow, the step is vetoed: gradients are never zeroed without a word."""
    weight = zeros(2)
    run = UpdateLoop(GradientClipHook(max_norm=1e-25), optimizers=[sgd(weight)])
    assert run.batch({weight: 1e15}).step_skipped
    assert not run.batch({weight: 1.0}).step_skipped
    assert weight.detach().norm().item() == pytest.approx(1e-25)


@SCALERS
def test_the_schedule_waits_for_a_skipped_step(zeros, scaled):
    """With inf on batches 0 and 2 of 4, StepLR(1, 0.5) shows 1, 0.5, 0.5, 0.25, and nobody warns."""
    weight = zeros(1)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    run = UpdateLoop(GradientClipHook(), optimizers=[optimizer], schedulers=[scheduler], scaler=scaler_of(scaled))
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for gradient in (math.inf, 1.0, math.inf, 1.0):
            run.batch({weight: gradient})
            rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 0.5, 0.5, 0.25]


@SCALERS
def test_an_inf_does_not_outlive_its_window(zeros, sgd, scaled):
    """One inf on batch 0 of 4 costs one step and one back-off: p goes from 1 to -2, the scale from 1024 to 512."""
    weight = nn.Parameter(torch.ones(1))
    run = UpdateLoop(GradientClipHook(), optimizers=[sgd(weight)], scaler=scaler_of(scaled))
    for gradient in (math.inf, 1.0, 1.0, 1.0):
        run.batch({weight: gradient})
    assert weight.item() == pytest.approx(-2.0, abs=1e-5)
    assert run.scaler is None or run.scaler.get_scale() == 512.0


class TooLarge(TrainingUpdateHook):
    """Vetoes by a norm that is finite."""

    reads_grad = False

    def __init__(self, priority):
        self.priority = priority

    def before_optimizer_step(self, ctx, *, will_skip):
        return float(ctx.grad_norm) < 3.0


@SCALERS
@pytest.mark.parametrize("priority", [5, 27, 45])
def test_another_veto_leaves_the_scale_and_the_next_window_alone(zeros, sgd, priority, scaled):
    """A veto on a finite norm, before or after the scaler and clipping, costs that step and nothing else."""
    weight, hook = zeros(2), GradientClipHook()
    scaler = scaler_of(scaled)
    run = UpdateLoop(hook, TooLarge(priority), optimizers=[sgd(weight)], scaler=scaler)
    run.batch({weight: [0.0, 0.5]})
    state = scaler.state_dict() if scaled else None
    ctx = run.batch({weight: [3.0, 4.0]})
    assert [veto.hook for veto in ctx.outcome.vetoes] == ["too_large"]
    assert not ctx.outcome.found_inf
    assert not scaled or scaler.state_dict() == state
    run.batch({weight: [0.0, 0.5]})
    assert weight.tolist() == [0.0, -1.0]
    assert hook.last_norm == 0.5
    assert (hook.measured_steps, hook.clipped_steps) == (3, 0)


def test_vetoed_steps_do_not_count_as_clipped(zeros, sgd):
    """Of a clipped, a small and an infinite gradient, three windows are measured and one step is clipped."""
    weight, hook = zeros(1), GradientClipHook()
    run = UpdateLoop(hook, optimizers=[sgd(weight)])
    for gradient in (2.0, 0.5, math.inf):
        run.batch({weight: gradient})
    assert (hook.measured_steps, hook.clipped_steps) == (3, 1)


@SCALERS
@pytest.mark.parametrize("clip_value", [None, 1.0])
def test_an_error_when_asked_for_names_norm_parameter_and_remedy(sgd, scaled, clip_value):
    """error_if_nonfinite raises before anything is stepped, and the next window is as good as any."""
    model = nn.ModuleDict({"first": nn.Linear(1, 1), "second": nn.Linear(1, 1)})
    parameters = dict(model.named_parameters())
    hook = GradientClipHook(error_if_nonfinite=True, clip_value=clip_value)
    run = UpdateLoop(hook, optimizers=[sgd(*parameters.values())], scaler=scaler_of(scaled), models={"main": model})
    before = copy.deepcopy(model.state_dict())
    gradients = dict.fromkeys(parameters.values(), 1.0)
    bad = {parameters["first.bias"]: math.nan, parameters["second.weight"]: math.inf}
    with pytest.raises(NonFiniteGradientError) as caught:
        run.batch({**gradients, **bad})
    message = str(caught.value)
    assert "'first.bias'" in message
    assert "nan" in message
    assert "error_if_nonfinite=False" in message
    assert any("GradientClipHook" in note for note in caught.value.__notes__)
    torch.testing.assert_close(model.state_dict(), before, rtol=0.0, atol=0.0)
    run.batch(gradients)
    assert run.steps == 1
    assert not torch.equal(model["first"].bias, before["first.bias"])


def test_the_error_says_what_it_cannot_name(zeros, sgd):
    """An overflowing norm has no culprit, and a parameter outside of all models has no name; the message says so."""
    weight = zeros(2)
    run = UpdateLoop(GradientClipHook(error_if_nonfinite=True), optimizers=[sgd(weight)])
    with pytest.raises(NonFiniteGradientError, match="every single gradient is finite, but their norm overflows"):
        run.batch({weight: 1e20})
    with pytest.raises(NonFiniteGradientError, match=r"no model of ctx\.models holds"):
        run.batch({weight: math.inf})


def test_the_error_is_for_non_finite_norms_alone(zeros, sgd):
    """error_if_nonfinite changes nothing for finite gradients."""
    weight = zeros(2)
    UpdateLoop(GradientClipHook(error_if_nonfinite=True), optimizers=[sgd(weight)]).batch({weight: [3.0, 4.0]})
    assert weight.tolist() == pytest.approx([-0.6, -0.8])
