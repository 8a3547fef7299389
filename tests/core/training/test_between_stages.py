"""What plain hooks and users do between the stages does not make the update wrong."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import PassThrough, TrainingUpdateHook, TrainingUpdateOrchestrator


class Halve(TrainingUpdateHook):
    """Divides by the norm, so that every gradient has length one."""

    reads_grad = False

    def before_optimizer_step(self, ctx, *, will_skip):
        ctx.window.divide(ctx.window.norm())
        return True


class Closing(PassThrough):
    """Counts how often it is closed."""

    closed = 0

    def close(self):
        self.closed += 1


class Remembers(PassThrough):
    """Has state, and may refuse one."""

    name = "remembers"

    def __init__(self, refuses=False):
        self.value, self.refuses = 0, refuses

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        if self.refuses:
            raise ValueError("no")
        self.value = state["value"]


@pytest.fixture
def weight():
    return torch.nn.Parameter(torch.zeros(2))


def _batch(orchestrator, optimizers, loss, *, between=None, **options):
    with TrainContext(optimizers=optimizers, **options) as ctx:
        orchestrator(ctx, TrainingStage.BEFORE_BATCH)
        if between == "window open":
            ctx.window_complete = False
        if isinstance(between, torch.amp.GradScaler):
            ctx.grad_scaler = between
        ctx.loss = loss
        orchestrator(ctx, TrainingStage.DO_BACKWARD)
        if callable(between):
            between(ctx)
        orchestrator(ctx, TrainingStage.DO_OPTIMIZER_STEP)
        orchestrator(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
    return ctx


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_gradients_that_changed_after_they_were_measured_are_measured_again(weight, fused, how):
    """A gradient that a plain hook changes after somebody asked for the norm is clipped by its own norm."""
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)

    def change(ctx):
        assert ctx.grad_norm.item() == 5.0
        if how == "in place":
            weight.grad.mul_(100)
        else:
            weight.grad = weight.grad * 100

    _batch(TrainingUpdateOrchestrator(Halve()), [optimizer], weight @ torch.tensor([3.0, 4.0]), between=change)
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))


def test_a_gradient_that_was_taken_away_is_no_gradient(weight):
    """When a plain hook sets .grad to None after the norm was asked, the optimizer has nothing to step on."""
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def take_away(ctx):
        _ = ctx.grad_norm
        weight.grad = None

    ctx = _batch(TrainingUpdateOrchestrator(), [optimizer], weight.sum(), between=take_away)
    assert ctx.step_skipped
    assert ctx.outcome.optimizers[0].reason == "no gradient"


def test_a_scaler_that_a_plain_hook_sets_at_before_batch_is_driven(weight):
    """A scaler set in the context after the orchestrator's turn at BEFORE_BATCH is unscaled by all the same."""
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    _batch(TrainingUpdateOrchestrator(), [optimizer], scaler.scale(weight.sum()), between=scaler)
    torch.testing.assert_close(weight.detach(), torch.tensor([-1.0, -1.0]))


def test_an_open_window_keeps_its_gradients(weight):
    """window_complete = False keeps gradients without a veto: the next batch adds to them."""
    optimizer, orchestrator = torch.optim.SGD([weight], lr=1.0), TrainingUpdateOrchestrator()
    _batch(orchestrator, [optimizer], 3 * weight.sum(), between="window open")
    _batch(orchestrator, [optimizer], 4 * weight.sum())
    torch.testing.assert_close(weight.detach(), torch.tensor([-7.0, -7.0]))
    _batch(orchestrator, [optimizer], weight.sum())
    torch.testing.assert_close(weight.detach(), torch.tensor([-8.0, -8.0]))


def test_a_parameter_of_two_optimizers_is_not_divided_twice(weight):
    """A parameter in two optimizers is refused where gradients would be divided, and allowed where not."""
    optimizers = [torch.optim.SGD([weight], lr=1.0), torch.optim.SGD([weight], lr=1.0)]
    with pytest.raises(ValueError, match=r"shape \(2,\) is in optimizer 0 and in optimizer 1"):
        _batch(TrainingUpdateOrchestrator(Halve()), optimizers, weight.sum())
    _batch(TrainingUpdateOrchestrator(), optimizers, weight.sum())
    torch.testing.assert_close(weight.detach(), torch.tensor([-2.0, -2.0]))


def test_gradients_are_those_that_an_optimizer_owns():
    """ctx.gradients leaves out parameters that no optimizer steps: nobody zeroes or unscales them."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    seen = []
    _batch(
        TrainingUpdateOrchestrator(),
        [optimizer],
        model(torch.ones(1, 2)).sum(),
        between=lambda ctx: seen.extend(ctx.gradients),
        model=model,
    )
    assert seen == ["weight"]


def test_autocast_is_as_before_whatever_is_closed_first():
    """Contexts opened inside one that is closed early are closed before it, so that autocast ends as it was."""
    with TrainContext() as ctx:
        outer = ctx.enter_batch_context(torch.autocast("cpu", torch.bfloat16))
        ctx.enter_batch_context(torch.autocast("cpu", enabled=False))
        outer.close()
    assert not torch.is_autocast_enabled("cpu")


def test_an_orchestrator_pickles_and_a_copy_closes_its_own_hooks():
    """An orchestrator survives pickling, and closing a deep copy leaves the original's hooks alone."""
    orchestrator = TrainingUpdateOrchestrator(Closing())
    assert [hook.name for hook in pickle.loads(pickle.dumps(orchestrator)).iter_hooks()] == ["closing"]
    twin = copy.deepcopy(orchestrator)
    twin.close()
    assert [next(one.iter_hooks()).closed for one in (orchestrator, twin)] == [0, 1]


def test_a_refused_state_leaves_every_hook_as_it_was():
    """When one hook refuses its state, those loaded before it get theirs back."""
    first, second = Remembers(), Remembers(refuses=True).labelled("second")
    first.value = 7
    with pytest.raises(ValueError, match="no"):
        (first + second).load_state_dict({"remembers": {"value": 1}, "second": {"value": 2}})
    assert first.value == 7


def test_a_step_that_failed_counts_as_skipped(weight):
    """After an error inside the optimizer-step stage, the context does not say that a step was taken."""

    class Fails(PassThrough):
        def before_optimizer_step(self, ctx, *, will_skip):
            raise RuntimeError("no step")

    orchestrator = TrainingUpdateOrchestrator(Fails())
    ctx = TrainContext(optimizers=[torch.optim.SGD([weight], lr=1.0)])
    orchestrator(ctx, TrainingStage.BEFORE_BATCH)
    ctx.loss = weight.sum()
    orchestrator(ctx, TrainingStage.DO_BACKWARD)
    with pytest.raises(RuntimeError, match="no step"):
        orchestrator(ctx, TrainingStage.DO_OPTIMIZER_STEP)
    assert ctx.step_skipped
    assert orchestrator.optimizer_step_skipped


@pytest.mark.parametrize("gradient", ["no entries", "conjugated"])
def test_unusual_gradients_are_measured(gradient):
    """A sparse gradient without entries has norm 0, and a conjugated complex one its true norm."""
    if gradient == "no entries":
        weight, expected = torch.nn.Parameter(torch.zeros(3, 2)), 0.0
        loss = torch.nn.functional.embedding(torch.zeros(0, dtype=torch.long), weight, sparse=True).sum()
    else:
        weight, expected = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64)), 5.0
        loss = torch.dot(weight.conj(), torch.tensor([3j, 4.0])).real
    norms = []
    _batch(
        TrainingUpdateOrchestrator(),
        [torch.optim.SGD([weight], lr=0.1)],
        loss,
        between=lambda ctx: norms.append(ctx.grad_norm.item()),
    )
    assert norms == [pytest.approx(expected)]


def test_a_stage_that_is_none_is_refused():
    """A stage by name, or the arguments in the wrong order, is a TypeError instead of silence."""
    with pytest.raises(TypeError, match=r"The stage is 'BEFORE_BATCH'; call orchestrator\(ctx, TrainingStage"):
        TrainingUpdateOrchestrator()(TrainContext(), "BEFORE_BATCH")


def test_an_optimizer_with_a_step_pre_hook_is_shown_true_gradients(weight):
    """Where code runs around a fused optimizer's step, gradients are divided before it instead of inside."""
    optimizer, seen = torch.optim.SGD([weight], lr=1.0, fused=True), []
    optimizer.register_step_pre_hook(lambda *_: seen.append(weight.grad.clone()))
    ctx = _batch(TrainingUpdateOrchestrator(Halve()), [optimizer], weight @ torch.tensor([3.0, 4.0]))
    torch.testing.assert_close(seen[0], torch.tensor([0.6, 0.8]))
    assert ctx.outcome.optimizers[0].division.startswith("plain: code around")


def test_a_deferred_flag_counts_as_it_was_when_it_was_deferred(weight):
    """A flag whose memory is used again after it was deferred still vetoes."""

    class Reuses(TrainingUpdateHook):
        reads_grad, defers_veto = False, True

        def before_optimizer_step(self, ctx, *, will_skip):
            flag = torch.ones(())
            ctx.defer_veto(flag, "as it was")
            flag.zero_()
            return True

    ctx = _batch(TrainingUpdateOrchestrator(Reuses()), [torch.optim.SGD([weight], lr=1.0)], weight.sum())
    assert ctx.step_skipped
