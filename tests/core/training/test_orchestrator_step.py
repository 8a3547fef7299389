"""DO_OPTIMIZER_STEP without a scaler: who moves, in which order, and what is said about it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import AlwaysVeto, PassThrough, TrainingUpdateHook, TrainingUpdateOrchestrator


def halving(optimizers):
    """One scheduler an optimizer, which halves the learning rate at every step."""
    return [StepLR(optimizer, 1, 0.5) for optimizer in optimizers]


def rates(loop):
    return [group["lr"] for optimizer in loop.optimizers for group in optimizer.param_groups]


class Note(TrainingUpdateHook):
    """Vetoes, with a reason, if it is told to."""

    def __init__(self, label, reason=None, veto=True):
        self.labelled(label)
        self.reason, self.veto = reason, veto

    def before_optimizer_step(self, ctx, *, will_skip):
        if self.reason:
            ctx.note_veto(self.reason)
        return not self.veto


def test_optimizers_step_then_schedulers_then_the_scaler(make_loop, scale, counting_scaler, two_optimizers):
    """No veto: optimizers step, then schedulers, then the scaler updates."""
    log = []
    scaler = counting_scaler()
    scaler.update = lambda *a: (log.append("update"), torch.amp.GradScaler.update(scaler, *a))

    def schedulers(optimizers):
        return [LambdaLR(o, lambda n, i=i: (log.append(f"schedule {i}"), 1.0)[1]) for i, o in enumerate(optimizers)]

    loop = make_loop(scale(scaler), weights=(1.0, 1.0), optimizers=two_optimizers, schedulers=schedulers)
    for place, optimizer in enumerate(loop.optimizers):
        optimizer.register_step_post_hook(lambda *a, place=place: log.append(f"step {place}"))
    log.clear()
    loop.batch(1.0, 1.0)
    assert log == ["step 0", "step 1", "schedule 0", "schedule 1", "update"]


@pytest.mark.parametrize("hooks", [[AlwaysVeto()], [PassThrough(), AlwaysVeto()], [AlwaysVeto(), PassThrough()]])
def test_any_veto_moves_nothing(make_loop, two_optimizers, hooks):
    """Any veto: none of the optimizers and none of the schedulers moves."""
    loop = make_loop(*hooks, weights=(1.0, 2.0), optimizers=two_optimizers, schedulers=halving)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ctx = loop.batch(1.0, 1.0)
    assert loop.values == [1.0, 2.0]
    assert rates(loop) == [1.0, 1.0]
    assert ctx.step_skipped


def test_a_veto_leaves_the_state_of_optimizers_alone(make_loop, veto):
    """A vetoed step changes no optimizer state."""
    loop = make_loop(veto(1), optimizers=lambda ps: [torch.optim.Adam(ps, lr=0.1)])
    loop.batch(1.0)
    state = {k: v.clone() for k, v in loop.optimizers[0].state[loop.parameters[0]].items()}
    loop.batch(5.0)
    assert all(torch.equal(v, state[k]) for k, v in loop.optimizers[0].state[loop.parameters[0]].items())


def test_the_scheduler_moves_with_executed_steps(make_loop, veto):
    """The learning rate falls after executed steps alone."""
    loop = make_loop(veto(0, 2), schedulers=halving)
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            loop.batch(0.0)
            seen += rates(loop)
    assert seen == [1.0, 0.5, 0.5, 0.25]


def test_counters_of_steps_and_of_batches(make_loop, veto):
    """Four batches, a veto on the second: three steps, four batches, and the weights of three."""
    loop = make_loop(veto(1))
    for gradient in (1.0, 100.0, 2.0, 4.0):
        loop.batch(gradient)
    assert (loop.steps, loop.batches, loop.values) == (3, 4, [1.0 - 7.0])


def test_a_veto_ends_the_window(make_loop, veto):
    """After a vetoed step the next window starts from cleared gradients."""
    loop = make_loop(veto(0))
    loop.batch(float("inf"))
    loop.batch(1.0)
    assert loop.values == [0.0]


def test_an_optimizer_without_any_gradient_is_skipped_quietly(make_loop, two_optimizers):
    """An optimizer without any gradient is skipped quietly, its scheduler too; the others proceed."""
    loop = make_loop(weights=(1.0, 2.0), optimizers=two_optimizers, schedulers=halving)
    loop.optimizers[1].register_step_pre_hook(lambda *a: pytest.fail("it has no gradient"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ctx = loop.batch(1.0, None)
    assert loop.values == [0.0, 2.0]
    assert rates(loop) == [0.5, 1.0]
    assert [(o.stepped, o.reason) for o in ctx.outcome.optimizers] == [(True, ""), (False, "no gradient")]
    assert not ctx.step_skipped


def test_no_optimizer_with_a_gradient_is_a_skipped_step(make_loop):
    """When no optimizer has a gradient the step counts as skipped, without a veto."""
    loop = make_loop(weights=(1.0, 2.0), schedulers=halving)
    ctx = loop.batch(None, None)
    assert ctx.step_skipped
    assert ctx.outcome.vetoes == ()
    assert rates(loop) == [1.0]


def test_reduce_lr_on_plateau_never_moves_with_a_step(make_loop):
    """`ReduceLROnPlateau` moves with `validate`, never with a step."""
    loop = make_loop(schedulers=lambda os: [ReduceLROnPlateau(os[0], patience=0, factor=0.5)])
    for _ in range(3):
        loop.batch(1.0)
    assert rates(loop) == [1.0]
    assert loop.schedulers[0].last_epoch == 0


def test_a_scheduler_follows_its_own_optimizer(make_loop, two_optimizers):
    """Schedulers move with the optimizer they were made for, in whatever order and number they are given."""
    loop = make_loop(
        weights=(1.0, 2.0),
        optimizers=two_optimizers,
        schedulers=lambda os: [StepLR(os[1], 1, 0.5), StepLR(os[1], 1, 0.1)],
    )
    loop.batch(1.0, None)
    assert rates(loop) == [1.0, 1.0]
    loop.batch(None, 1.0)
    assert rates(loop) == [1.0, 0.05]


@pytest.mark.parametrize("stage", ["SETUP", "BEFORE_BATCH"])
def test_lbfgs_is_refused_by_name(stage):
    """Optimizers that need a closure are refused by name, at SETUP or at the first batch after it."""
    optimizer = torch.optim.LBFGS([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(TypeError, match="LBFGS needs a closure.*Adam"):
        TrainingUpdateOrchestrator()(TrainContext(optimizers=[optimizer]), TrainingStage[stage])


@pytest.mark.parametrize(
    "name", ["SGD", "Adam", "AdamW", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adadelta"]
)
def test_other_optimizers_are_taken(make_loop, name):
    """Every other dense optimizer of torch steps as it does by itself."""
    make = getattr(torch.optim, name)
    loop, plain = make_loop(optimizers=lambda ps: [make(ps)]), make_loop(optimizers=lambda ps: [make(ps)])
    for gradient in (1.0, -2.0, 3.0):
        loop.batch(gradient)
        plain.parameters[0].grad = torch.tensor(gradient)
        plain.optimizers[0].step()
    assert loop.values == plain.values


def test_sparse_gradients_step_too():
    """An optimizer of sparse gradients steps as it does by itself."""
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    before = embedding.weight.detach().clone()
    orchestrator = TrainingUpdateOrchestrator()
    ctx = TrainContext(optimizers=[torch.optim.SGD(embedding.parameters(), lr=1.0)])
    orchestrator(ctx, TrainingStage.BEFORE_BATCH)
    ctx.loss = embedding(torch.tensor([1, 1, 2])).sum()
    orchestrator(ctx, TrainingStage.DO_BACKWARD)
    orchestrator(ctx, TrainingStage.DO_OPTIMIZER_STEP)
    change = before - embedding.weight.detach()
    assert torch.allclose(change.sum(1), torch.tensor([0.0, 8, 4, 0, 0, 0, 0, 0, 0, 0]))
    assert ctx.grad_norm.item() == pytest.approx(20**0.5)


def test_the_outcome_names_who_vetoed_and_why(make_loop, two_optimizers):
    """`last_outcome` tells which hooks vetoed and why, and per optimizer whether it stepped."""
    loop = make_loop(
        Note("spike", "loss 9.0 is a spike"), PassThrough(), Note("mute"), weights=(1.0, 2.0), optimizers=two_optimizers
    )
    ctx = loop.batch(1.0, None)
    outcome = loop.orchestrator.last_outcome
    assert outcome is ctx.outcome
    assert [tuple(veto) for veto in outcome.vetoes] == [("spike", "loss 9.0 is a spike"), ("mute", "returned False")]
    assert [(o.optimizer, o.stepped, o.reason) for o in outcome.optimizers] == [
        ("SGD", False, "vetoed"),
        ("SGD", False, "no gradient"),
    ]
    assert (outcome.skipped, outcome.found_inf, outcome.window_open) == (True, False, False)


def test_a_reason_belongs_to_the_hook_that_noted_it(make_loop):
    """A reason noted by a hook that then proceeds is not taken for the veto of another."""
    loop = make_loop(Note("calm", "not my veto", veto=False), Note("other"))
    loop.batch(1.0)
    assert [tuple(veto) for veto in loop.orchestrator.last_outcome.vetoes] == [("other", "returned False")]


def test_a_reason_may_be_noted_at_before_batch(make_loop):
    """A hook may note the reason of the veto that it is about to return at BEFORE_BATCH, from the first batch on."""

    class KeepGradients(TrainingUpdateHook):
        def before_batch(self, ctx, *, will_skip):
            ctx.note_veto("more batches follow")
            return False

    loop = make_loop(KeepGradients(), Note("other"))
    loop.batch(1.0)
    assert [veto.reason for veto in loop.orchestrator.last_outcome.vetoes] == ["returned False"]


def test_before_the_first_step_nothing_was_skipped(make_loop):
    """`optimizer_step_skipped` is False, and `last_outcome` None, before the first such stage."""
    orchestrator = make_loop(AlwaysVeto()).orchestrator
    assert orchestrator.optimizer_step_skipped is False
    assert orchestrator.last_outcome is None


def test_the_answer_is_about_the_most_recent_stage(make_loop, veto):
    """`optimizer_step_skipped` tells of the most recent optimizer-step stage, after good and vetoed ones."""
    loop = make_loop(veto(1))
    seen = []
    for _ in range(3):
        ctx = loop.batch(1.0)
        seen.append((loop.orchestrator.optimizer_step_skipped, ctx.step_skipped))
    assert seen == [(False, False), (True, True), (False, False)]


def test_plain_hooks_learn_of_the_skip_from_after_optimizer_step_on(make_loop):
    """``ctx.step_skipped`` and ``ctx.outcome`` are set at DO_OPTIMIZER_STEP; plain hooks read them afterwards."""
    loop = make_loop(AlwaysVeto())
    ctx = loop.context(loss=loop.loss(1.0))
    loop.orchestrator(ctx, TrainingStage.DO_BACKWARD)
    assert (ctx.step_skipped, ctx.outcome) == (False, None)
    loop.orchestrator(ctx, TrainingStage.DO_OPTIMIZER_STEP)
    assert ctx.step_skipped
    assert ctx.outcome.skipped


def test_step_count_is_the_count_before_this_step(make_loop):
    """``ctx.step_count`` at AFTER_OPTIMIZER_STEP is the count before this step."""

    class Watch(TrainingUpdateHook):
        def after_optimizer_step(self, ctx, *, skipped):
            self.count = ctx.step_count

    watch = Watch()
    loop = make_loop(watch)
    loop.batch(1.0)
    loop.batch(1.0)
    assert (watch.count, loop.steps) == (1, 2)
