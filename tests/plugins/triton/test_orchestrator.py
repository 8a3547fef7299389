"""The hook among others, in an orchestrator: the same run as without it, by another way."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.hooks import TrainContext
from nvalchemi.testing import StepCost
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator
from nvalchemi_hooks_triton import TritonHook

STAGES = (TrainingStage.DO_OPTIMIZER_STEP, TrainingStage.AFTER_OPTIMIZER_STEP)


class Divide(TrainingUpdateHook):
    """Asks for a division, as clipping does."""

    reads_grad = False

    def before_optimizer_step(self, ctx, *, will_skip):
        ctx.window.divide(torch.tensor(8.0))
        return True


class VetoOn(TrainingUpdateHook):
    """Vetoes some steps, on the device."""

    reads_grad = False
    defers_veto = True

    def __init__(self, *steps):
        self.steps, self.seen = steps, 0

    def before_optimizer_step(self, ctx, *, will_skip):
        ctx.defer_veto(torch.tensor(float(self.seen in self.steps)), "it was asked to")
        self.seen += 1
        return True


class Follow(TrainingUpdateHook):
    """Keeps an average and offers it to whoever steps."""

    reads_grad = False
    defers_veto = True

    def __init__(self, weights):
        self.averages, self.weights, self.taken = [weight.detach().clone() for weight in weights], weights, []

    def before_optimizer_step(self, ctx, *, will_skip):
        self.offer = ctx.offer_average(self.averages, self.weights, 0.1)
        return True

    def after_optimizer_step(self, ctx, *, skipped):
        self.taken.append(self.offer is not None and self.offer.taken)
        if not self.taken[-1] and not ctx.step_skipped:
            torch._foreach_lerp_(self.averages, [weight.detach() for weight in self.weights], 0.1)


class Run:
    """Some weights under an orchestrator, and what became of them."""

    def __init__(self, *more, lazy=False, vetoes=(3, 4), steps=8):
        torch.manual_seed(0)
        self.weights = [torch.nn.Parameter(torch.randn(600)), torch.nn.Parameter(torch.randn(3, 5))]
        self.optimizer = torch.optim.AdamW(self.weights, lr=0.1, fused=True)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.follow = Follow(self.weights)
        self.update = TrainingUpdateOrchestrator(Divide(), VetoOn(*vetoes), self.follow, *more, lazy=lazy)
        self.outcomes = [self.step() for _ in range(steps)]

    def step(self, look=lambda ctx: None, **fields):
        """Take one step, look at its context, and return what happened."""
        with TrainContext(optimizers=[self.optimizer], lr_schedulers=[self.scheduler], **fields) as ctx:
            self.update(ctx, TrainingStage.BEFORE_BATCH)
            loss = sum((weight - 1.0).square().sum() for weight in self.weights)
            ctx.loss = loss if ctx.grad_scaler is None else ctx.grad_scaler.scale(loss)
            self.update(ctx, TrainingStage.DO_BACKWARD)
            for stage in STAGES:
                self.update(ctx, stage)
            look(ctx)
        return self.update.resolve() or self.update.last_outcome


@pytest.mark.parametrize("lazy", [False, True])
def test_it_is_the_same_run(lazy):
    """Weights, state, average, schedule and vetoes are those of a run without the hook, eager or lazy."""
    mine, theirs = Run(TritonHook(), lazy=lazy), Run()
    torch.testing.assert_close(mine.weights, theirs.weights, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine.follow.averages, theirs.follow.averages, rtol=1e-5, atol=1e-5)
    for one, other in zip(mine.optimizer.state.values(), theirs.optimizer.state.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert mine.scheduler.state_dict() == theirs.scheduler.state_dict()
    skipped = [outcome.skipped for outcome in mine.outcomes]
    assert skipped == [outcome.skipped for outcome in theirs.outcomes] == [place in (3, 4) for place in range(8)]


def test_it_says_who_stepped():
    """The first step, which makes the state, is torch's; the others are this executor's, average included."""
    run = Run(TritonHook(), vetoes=())
    ways = [outcome.optimizers[0].division for outcome in run.outcomes]
    assert ways == ["folded", *["folded by OnePassExecutor"] * 7]
    assert run.follow.taken == [False, *[True] * 7]


class Scaler:
    """A loss scale of 16."""

    def is_enabled(self):
        return True

    def scale(self, loss):
        return loss * 16.0

    def divisor(self, device):
        return torch.tensor(16.0)

    def close(self, found_inf):
        pass


@pytest.mark.parametrize("lazy", [False, True])
def test_gradients_are_true_after_the_step(lazy):
    """A loss scale stays in ``.grad``, but not in ``ctx.gradients``, before the step and after it."""
    run, found = Run(TritonHook(), lazy=lazy, vetoes=()), {}

    def look(ctx):
        found.update(ctx.gradients)

    model = torch.nn.ParameterList(run.weights)
    expected = 2 * (run.weights[0].detach() - 1.0)
    outcome = run.step(look, models={"main": model}, grad_scaler=Scaler())
    assert outcome.optimizers[0].division == "folded by OnePassExecutor"
    torch.testing.assert_close(run.weights[0].grad, 16.0 * expected)
    torch.testing.assert_close(found["0"], expected)


def test_lazy_reads_nothing():
    """In lazy mode the host reads nothing in a step, the average and the veto included."""
    run = Run(TritonHook(), lazy=True, vetoes=())
    with StepCost() as cost, TrainContext(optimizers=[run.optimizer]) as ctx:
        run.update(ctx, TrainingStage.BEFORE_BATCH)
        ctx.loss = sum(weight.square().sum() for weight in run.weights)
        run.update(ctx, TrainingStage.DO_BACKWARD)
        for stage in STAGES:
            run.update(ctx, stage)
    assert cost.host_reads == 0, cost.host_read_sites


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_of_the_optimizer_are_called(register):
    """Who has hooked into the optimizer's step is called, so such a step is left to torch."""
    run = Run(TritonHook(), vetoes=())
    calls = []
    getattr(run.optimizer, register)(lambda *_: calls.append(1))
    outcome = run.step()
    assert calls == [1]
    assert "OnePassExecutor" not in outcome.optimizers[0].division
    assert run.follow.taken[-1] is False
