"""What a window holds is part of the true gradient, and is divided out with whatever else is pending."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator

S = TrainingStage


class Holds(TrainingUpdateHook):
    """Says in its last transform that the window holds four, and at the step that it is half as much."""

    priority = 10
    reads_grad = False

    def __init__(self, *, late=1.0):
        self.late = late

    def transform_loss(self, ctx, loss):
        ctx.window.normalise(4.0)
        return loss

    def before_optimizer_step(self, ctx, *, will_skip):
        if self.late != 1.0:
            ctx.window.normalise(torch.tensor(self.late))
        return True


class Halves(TrainingUpdateHook):
    """Divides by two, as clipping does."""

    priority = 30
    reads_grad = False

    def before_optimizer_step(self, ctx, *, will_skip):
        self.norm = float(ctx.window.norm())
        ctx.window.divide(torch.tensor(2.0))
        return True


class Reads(TrainingUpdateHook):
    """Looks at the gradient itself."""

    def __init__(self, priority):
        self.priority = priority

    def before_optimizer_step(self, ctx, *, will_skip):
        self.seen = ctx.optimizers[0].param_groups[0]["params"][0].grad.item()
        return True


def step(*hooks, scaler=None, lazy=False):
    """Take one step on a gradient of 8 with learning rate 1; return what was seen on the way."""
    weight = torch.nn.Parameter(torch.tensor([0.0]))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=lazy)
    update = TrainingUpdateOrchestrator(*hooks, lazy=lazy)
    with TrainContext(model=torch.nn.ParameterList([weight]), optimizers=[optimizer], grad_scaler=scaler) as ctx:
        update(ctx, S.BEFORE_BATCH)
        ctx.loss = 8 * weight.sum()
        if scaler is not None:
            ctx.loss = scaler.scale(ctx.loss)
        update(ctx, S.DO_BACKWARD)
        before = float(ctx.grad_norm), float(*ctx.gradients.values())
        update(ctx, S.DO_OPTIMIZER_STEP)
        update(ctx, S.AFTER_OPTIMIZER_STEP)
        after = float(ctx.grad_norm), float(*ctx.gradients.values())
        assert not ctx.step_skipped
    return weight.item(), before, after


@pytest.fixture(params=["no scaler", "torch's scaler"])
def scaler(request):
    """None, or torch's scaler."""
    return None if request.param == "no scaler" else torch.amp.GradScaler("cpu", init_scale=16.0)


@pytest.mark.parametrize("lazy", [False, True])
def test_the_step_and_everything_true_hold_it(scaler, lazy):
    """A gradient of 8 in a window of four is 2: before the step, in its norm, and in what the optimizer uses."""
    moved, before, after = step(Holds(), scaler=scaler, lazy=lazy)
    assert (moved, before, after) == (-2.0, (2.0, 2.0), (2.0, 2.0))


@pytest.mark.parametrize("lazy", [False, True])
def test_clipping_comes_on_top_and_leaves_the_norm_alone(scaler, lazy):
    """A factor asked for later divides further; the norm before clipping holds the window and not the factor."""
    halves = Halves()
    moved, _, after = step(Holds(), halves, scaler=scaler, lazy=lazy)
    assert (moved, after[0], halves.norm) == (-1.0, 2.0, 2.0)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("reader", [5, 20, 40])
def test_what_is_learned_later_divides_further(scaler, lazy, reader):
    """Said again at the step it divides by the product, before or after somebody has read the gradient itself."""
    reads = Reads(reader)
    moved, before, after = step(Holds(late=0.5), Halves(), reads, scaler=scaler, lazy=lazy)
    assert (moved, before[0], after[0]) == (-2.0, 2.0, 4.0)
    assert reads.seen == {5: 2.0, 20: 4.0, 40: 2.0}[reader]


@pytest.mark.parametrize("by", [0, -1.0, float("nan"), float("inf"), "4", torch.ones(2)])
def test_what_no_window_can_hold_is_refused(by):
    """Gradients divided by nothing, by a negative number or by a vector would be wrong in silence."""
    update, weight = TrainingUpdateOrchestrator(), torch.nn.Parameter(torch.ones(1))
    with TrainContext(optimizers=[torch.optim.SGD([weight])]) as ctx:
        update(ctx, S.BEFORE_BATCH)
        with pytest.raises(TypeError, match=r"ctx\.window\.normalise got .*; give a finite number above 0"):
            ctx.window.normalise(by)
