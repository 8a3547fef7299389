"""The lazy outcome: a step is taken under a veto on the device, and the host learns of it when somebody asks."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch

from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage as S
from nvalchemi.training.hooks import AlwaysVeto, TrainingUpdateHook, TrainingUpdateOrchestrator

INF = float("inf")


class DeferredVeto(TrainingUpdateHook):
    """Vetoes on the device the batches that it is told, and writes down what it learns."""

    reads_grad = False
    defers_veto = True

    def __init__(self, *batches, label="deferred", found_inf=True):
        self.batches, self.found_inf = batches, found_inf
        self.labelled(label)
        self.after, self.known = [], []

    def before_optimizer_step(self, ctx, *, will_skip):
        ctx.defer_veto(torch.tensor(float(ctx.batch_count in self.batches)), "told so", found_inf=self.found_inf)
        return True

    def after_optimizer_step(self, ctx, *, skipped):
        flag = ctx.veto_flag
        self.after.append((skipped, None if flag is None else (flag.dtype, flag.dim(), flag.tolist())))

    def settled(self, ctx, *, skipped):
        self.known.append((ctx.batch_count, ctx.step_count, skipped))


class Knows(TrainingUpdateHook):
    """Does not defer: it wants to be told the truth."""

    reads_grad = False

    def __init__(self):
        self.told = []

    def after_optimizer_step(self, ctx, *, skipped):
        self.told.append(skipped)


@pytest.fixture
def lazy_loop(make_loop):
    """Make a loop with a lazy orchestrator over fused AdamW that has stepped once, so that there is a state."""

    def make(*hooks, optimizers=None, **options):
        loop = make_loop(
            *hooks,
            optimizers=optimizers or (lambda ps: [torch.optim.AdamW(ps, lr=0.5, fused=True)]),
            **options,
        )
        loop.orchestrator = TrainingUpdateOrchestrator(*hooks, lazy=True)
        return loop

    return make


def drive(loop, *gradients, **fields):
    """Take one batch through all stages without asking what became of it."""
    with loop.context(**fields) as ctx:
        loop.orchestrator(ctx, S.BEFORE_BATCH)
        ctx.loss = loop.loss(*gradients)
        loop.orchestrator(ctx, S.DO_BACKWARD)
        loop.orchestrator(ctx, S.DO_OPTIMIZER_STEP)
        loop.orchestrator(ctx, S.AFTER_OPTIMIZER_STEP)
    loop.batches += 1
    return ctx


def settled_loop(lazy_loop, *hooks, **options):
    """Return a lazy loop that has made its first step, which is resolved at once."""
    loop = lazy_loop(*hooks, **options)
    drive(loop, *[1.0] * len(loop.parameters))
    assert loop.orchestrator.pending is None
    return loop


def test_a_step_is_pending_until_somebody_asks(lazy_loop):
    """After a lazy step nobody knows its outcome; `resolve` tells it, and every child learns of it once."""
    hook = DeferredVeto(2)
    loop = settled_loop(lazy_loop, hook)
    drive(loop, 1.0)
    assert loop.orchestrator.pending is not None
    assert hook.known == [(0, 0, False)]
    outcome = loop.orchestrator.resolve()
    assert (outcome.skipped, outcome.resolution) == (False, "lazily, after the step")
    assert hook.known == [(0, 0, False), (1, 0, False)]
    assert loop.orchestrator.resolve() is outcome
    assert len(hook.known) == 2


def test_a_veto_on_the_device_leaves_everything_as_it_was(lazy_loop):
    """A lazily vetoed step leaves weights, moments and step counters bit for bit, and is told with its reason."""
    loop = settled_loop(lazy_loop, DeferredVeto(1))
    before = copy.deepcopy((loop.values, loop.optimizers[0].state_dict()))
    drive(loop, 3.0)
    torch.testing.assert_close((loop.values, loop.optimizers[0].state_dict()), before, rtol=0, atol=0)
    outcome = loop.orchestrator.resolve()
    assert (outcome.skipped, outcome.found_inf, outcome.resolution) == (True, True, "lazily, after the step")
    assert [tuple(veto) for veto in outcome.vetoes] == [("deferred", "told so")]
    assert [(one.stepped, one.reason) for one in outcome.optimizers] == [(False, "vetoed")]


def test_who_defers_is_told_false_and_looks_at_the_flag(lazy_loop):
    """While the decision is on the device a deferring child gets ``skipped=False`` and a flag of exactly 0 or 1."""
    hook = DeferredVeto(2)
    loop = settled_loop(lazy_loop, hook)
    drive(loop, 1.0)
    drive(loop, 1.0)
    assert hook.after == [
        (False, None),
        (False, (torch.float32, 0, 0.0)),
        (False, (torch.float32, 0, 1.0)),
    ]
    loop.orchestrator.resolve()
    assert hook.known[-1] == (2, 0, True)


def test_who_does_not_defer_is_told_the_truth(lazy_loop):
    """A child that does not know of deferred vetoes has them resolved before it is called."""
    hook = Knows()
    loop = settled_loop(lazy_loop, DeferredVeto(1), hook)
    drive(loop, 1.0)
    assert loop.orchestrator.pending is None
    assert hook.told == [False, True]


@pytest.mark.parametrize("stage", ["before_batch", "transform_loss"])
def test_who_counts_in_settled_is_told_before_it_acts(lazy_loop, stage):
    """A child that neither defers nor decides, but counts in ``settled``, has counted before its next call."""

    class Counts(TrainingUpdateHook):
        reads_grad = False
        count = 0

        def settled(self, ctx, *, skipped):
            self.count += 1

    seen = []

    def act(self, ctx, *args, **kwargs):
        seen.append(self.count)
        return args[0] if args else True

    counting = type("ActsOnIt", (Counts,), {stage: act})()
    loop = settled_loop(lazy_loop, DeferredVeto(), counting)
    for _ in range(2):
        drive(loop, 1.0)
    assert seen == [0, 1, 2]


@pytest.mark.parametrize(
    "ask",
    [
        lambda loop, ctx: ctx.step_skipped,
        lambda loop, ctx: ctx.outcome,
        lambda loop, ctx: ctx.optimizers,
        lambda loop, ctx: ctx.lr_schedulers,
        lambda loop, ctx: ctx.gradients,
        lambda loop, ctx: ctx.grad_norm,
        lambda loop, ctx: ctx.window.norm(),
        lambda loop, ctx: loop.orchestrator.optimizer_step_skipped,
        lambda loop, ctx: loop.orchestrator.last_outcome,
        lambda loop, ctx: loop.orchestrator.explain(),
        lambda loop, ctx: loop.orchestrator.state_dict(),
        lambda loop, ctx: loop.orchestrator.close(),
        lambda loop, ctx: pickle.dumps(loop.orchestrator),
        lambda loop, ctx: drive(loop, 1.0),
    ],
)
def test_whoever_reads_what_depends_on_it_resolves_it(lazy_loop, ask):
    """Outcome, optimizers, schedulers, gradients, a save, ``close`` and the next step resolve a pending one."""
    hook = DeferredVeto(1)
    loop = settled_loop(lazy_loop, hook)
    ctx = drive(loop, 1.0)
    assert hook.known == [(0, 0, False)]
    ask(loop, ctx)
    assert hook.known[1] == (1, 0, True)


def test_what_does_not_depend_on_it_does_not_resolve_it(lazy_loop):
    """The count of steps before this one, the loss and the batch are read without resolving the step."""
    loop = settled_loop(lazy_loop, DeferredVeto())
    ctx = drive(loop, 1.0, batch="batch")
    _ = ctx.step_count, ctx.global_step_count, ctx.possible_step_counts, ctx.loss, ctx.batch, ctx.veto_flag
    repr(ctx.window)
    assert loop.orchestrator.pending is not None


def test_schedulers_move_when_it_is_resolved_and_only_then(lazy_loop):
    """A scheduler moves once for a step that was taken, never for one that was vetoed, and before the next step."""
    loop = settled_loop(
        lazy_loop,
        DeferredVeto(2),
        schedulers=lambda os: [torch.optim.lr_scheduler.ExponentialLR(os[0], 0.5)],
    )
    rates = []
    for _ in range(3):
        ctx = drive(loop, 1.0)
        rates.append(loop.optimizers[0].param_groups[0]["lr"])
        rates.append(ctx.optimizers[0].param_groups[0]["lr"])
    assert rates == [0.25, 0.125, 0.125, 0.125, 0.125, 0.0625]


def test_a_context_of_the_next_batch_knows_the_step_before(lazy_loop):
    """Learning rates read through the context of the next batch are those after the step that was pending."""
    loop = settled_loop(
        lazy_loop,
        DeferredVeto(),
        schedulers=lambda os: [torch.optim.lr_scheduler.ExponentialLR(os[0], 0.5)],
    )
    drive(loop, 1.0)
    with loop.context() as ctx:
        loop.orchestrator(ctx, S.BEFORE_BATCH)
        assert loop.orchestrator.pending is not None
        assert ctx.optimizers[0].param_groups[0]["lr"] == 0.125
    assert loop.orchestrator.pending is None


def test_an_old_context_does_not_resolve_a_newer_step(lazy_loop):
    """A context that somebody has kept knows its own outcome, and leaves the pending step alone."""
    loop = settled_loop(lazy_loop, DeferredVeto(1))
    kept = drive(loop, 1.0)
    with loop.context() as begun:
        loop.orchestrator(begun, S.BEFORE_BATCH)
    drive(loop, 1.0)
    assert kept.step_skipped
    assert begun.optimizers == loop.optimizers
    assert loop.orchestrator.pending is not None


@pytest.mark.parametrize(
    ("hooks", "why"),
    [
        ([DeferredVeto(label="a"), AlwaysVeto()], "a hook has vetoed"),
        ([], "nothing is left to decide"),
    ],
)
def test_what_the_host_knows_anyway_is_resolved_at_once(lazy_loop, hooks, why):
    """A step on which the host has decided is not pending, and says why."""
    loop = lazy_loop(*hooks)
    for _ in range(2):
        drive(loop, 1.0)
    assert loop.orchestrator.pending is None
    assert loop.orchestrator.last_outcome.resolution == f"at once: {why}"
    assert f"at once: {why}" in str(loop.orchestrator.explain())


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda ps: [torch.optim.AdamW(ps, lr=0.5)], "AdamW takes no veto along: the optimizer is not fused"),
        (lambda ps: [torch.optim.RMSprop(ps, lr=0.5)], "RMSprop takes no veto along: the optimizer is not fused"),
    ],
)
def test_an_optimizer_that_takes_no_veto_along_is_resolved_at_once(lazy_loop, make, why):
    """An optimizer that is not fused is stepped, or held back, once the host knows; silently correct."""
    loop = lazy_loop(DeferredVeto(1), optimizers=make)
    drive(loop, 1.0)
    values = loop.values
    drive(loop, 1.0)
    assert loop.orchestrator.pending is None
    assert loop.values == values
    assert loop.orchestrator.last_outcome.resolution == f"at once: {why}"


def test_a_first_step_is_resolved_at_once(lazy_loop):
    """Before there is state to be left alone the host decides: a vetoed first step makes no state at all."""
    loop = lazy_loop(DeferredVeto(0))
    drive(loop, 1.0)
    assert loop.orchestrator.pending is None
    assert loop.orchestrator.last_outcome.skipped
    assert len(loop.optimizers[0].state) == 0
    assert loop.values == [1.0]


def test_fused_momentum_waits_for_its_buffers(lazy_loop):
    """Fused SGD with momentum whose first step is vetoed is as if there had been no step (trap: unwritten buffers)."""
    sgd = lambda ps: [torch.optim.SGD(ps, lr=0.5, momentum=0.9, fused=True)]  # noqa: E731
    loop = lazy_loop(DeferredVeto(0, 2), optimizers=sgd)
    values = []
    for _ in range(4):
        drive(loop, 1.0)
        values.append(loop.values[0])
    assert values == [1.0, 0.5, 0.5, pytest.approx(0.5 - 0.5 * 1.9)]
    assert loop.optimizers[0].state[loop.parameters[0]]["momentum_buffer"].item() == pytest.approx(1.9)


def test_a_scaler_that_is_not_ours_is_resolved_at_once(lazy_loop, scale, counting_scaler):
    """torch's scaler decides on the host, so the step is not pending, and its window is closed once."""
    scaler = counting_scaler()
    loop = lazy_loop(scale(scaler), DeferredVeto())
    for _ in range(2):
        drive(loop, 1.0)
        assert loop.orchestrator.pending is None
    assert loop.orchestrator.last_outcome.resolution == "at once: the scaler unscales by itself"


def test_a_folding_scaler_is_closed_on_the_device(lazy_loop, scale, folding_scaler):
    """A scaler that folds is told by a float32 tensor, exactly 0 or 1, once a window."""
    scaler = folding_scaler()
    loop = settled_loop(lazy_loop, scale(scaler), DeferredVeto(2))
    for _ in range(2):
        drive(loop, 1.0)
    loop.orchestrator.resolve()
    assert scaler.closed[0] is False
    assert [(flag.dtype, flag.dim(), flag.item()) for flag in scaler.closed[1:]] == [
        (torch.float32, 0, 0.0),
        (torch.float32, 0, 1.0),
    ]


def test_a_veto_on_finite_gradients_beside_a_scale_is_resolved_at_once(lazy_loop, scale, folding_scaler):
    """A deferred veto that is no found-inf has to leave the scale as it was, which only the host can say."""
    scaler = folding_scaler()
    loop = lazy_loop(scale(scaler), DeferredVeto(1, found_inf=False))
    for _ in range(2):
        drive(loop, 1.0)
    assert loop.orchestrator.pending is None
    assert scaler.closed == [False, None]
    assert "leaves the loss scale as it is" in loop.orchestrator.last_outcome.resolution


@pytest.mark.parametrize("gradients", [(INF, 1.0), (1.0, INF), (INF, INF), (1.0, 1.0)])
def test_without_a_vetoing_hook_each_optimizer_skips_by_itself(lazy_loop, scale, folding_scaler, gradients):
    """Under a scale alone each optimizer skips for its own gradients, on the device, and its scheduler with it."""
    scaler = folding_scaler()
    loop = settled_loop(
        lazy_loop,
        scale(scaler),
        weights=(1.0, 1.0),
        optimizers=lambda ps: [torch.optim.AdamW([p], lr=0.5, fused=True) for p in ps],
        schedulers=lambda os: [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in os],
    )
    before = loop.values
    drive(loop, *gradients)
    assert loop.orchestrator.pending is not None
    finite = [gradient != INF for gradient in gradients]
    assert [new != old for new, old in zip(loop.values, before, strict=True)] == finite
    outcome = loop.orchestrator.resolve()
    assert [one.stepped for one in outcome.optimizers] == finite
    assert outcome.skipped is not any(finite)
    assert scaler.closed[-1].item() == float(not all(finite))
    assert [o.param_groups[0]["lr"] for o in loop.optimizers] == [0.125 if fine else 0.25 for fine in finite]


def test_gradients_are_true_whatever_the_veto_was(lazy_loop, scale, folding_scaler):
    """`ctx.gradients` and `ctx.grad_norm` are true after a lazy step, taken (divided) or vetoed (still scaled)."""
    loop = settled_loop(lazy_loop, scale(folding_scaler()), DeferredVeto(1), weights=(1.0, 1.0))
    for vetoed in (True, False):
        ctx = drive(loop, 3.0, 4.0)
        assert {name: gradient.item() for name, gradient in ctx.gradients.items()} == {"p0": 3.0, "p1": 4.0}
        assert ctx.grad_norm.item() == 5.0
        assert loop.grads == ([24.0, 32.0] if vetoed else [3.0, 4.0])


def test_readings_come_with_the_outcome(lazy_loop):
    """A number read along is known at ``settled``, as it was at the moment when it was given."""

    class Reads(DeferredVeto):
        def before_optimizer_step(self, ctx, *, will_skip):
            number = torch.tensor(float(ctx.batch_count))
            self.reading = ctx.read_later(number)
            number.fill_(-1.0)
            return super().before_optimizer_step(ctx, will_skip=will_skip)

        def settled(self, ctx, *, skipped):
            self.known.append(self.reading.value)

    hook = Reads()
    loop = settled_loop(lazy_loop, hook)
    drive(loop, 1.0)
    drive(loop, 1.0)
    loop.orchestrator.resolve()
    assert hook.known == [0.0, 1.0, 2.0]


def test_readings_alone_are_awaited_lazily_too(lazy_loop):
    """Where nothing can veto, any optimizer steps for certain, and only the readings are on their way."""

    class Reads(TrainingUpdateHook):
        reads_grad, defers_veto = False, True

        def before_optimizer_step(self, ctx, *, will_skip):
            self.reading = ctx.read_later(ctx.window.norm())
            assert ctx.veto_flag is None
            return True

        def settled(self, ctx, *, skipped):
            self.value = self.reading.value

    hook = Reads()
    loop = lazy_loop(hook, optimizers=lambda ps: [torch.optim.SGD(ps, lr=1.0)])
    drive(loop, 3.0)
    assert loop.orchestrator.pending is not None
    assert loop.values == [-2.0]
    assert loop.orchestrator.resolve().skipped is False
    assert hook.value == 3.0


def test_an_exception_in_settled_reaches_whoever_asked(lazy_loop):
    """An exception in ``settled`` is raised where the outcome is asked for, names its hook, and loses no count."""

    class Fails(DeferredVeto):
        def settled(self, ctx, *, skipped):
            if ctx.batch_count == 1:
                raise OSError("settled")

    loop = settled_loop(
        lazy_loop,
        Fails(),
        schedulers=lambda os: [torch.optim.lr_scheduler.ExponentialLR(os[0], 0.5)],
    )
    told = []
    ctx = drive(loop, 1.0)
    ctx.when_resolved(lambda ctx: told.append(ctx.step_skipped))
    with pytest.raises(OSError, match="settled") as caught:
        loop.orchestrator.resolve()
    assert "In hook Fails" in caught.value.__notes__[0]
    assert "AFTER_OPTIMIZER_STEP" in caught.value.__notes__[0]
    assert told == [False]
    assert ctx.step_skipped is False
    assert loop.optimizers[0].param_groups[0]["lr"] == 0.125
    assert loop.orchestrator.resolve().skipped is False


def test_an_error_under_way_stays_the_one_that_is_raised(lazy_loop):
    """Leaving the orchestrator with an error resolves the step; what fails then is a note on the error."""

    class Fails(DeferredVeto):
        def settled(self, ctx, *, skipped):
            if ctx.batch_count == 1:
                raise OSError("settled")

    loop = settled_loop(lazy_loop, Fails())

    def train():
        with loop.orchestrator:
            drive(loop, 1.0)
            raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        train()
    assert "Closing the latest step failed as well" in caught.value.__notes__[0]
    assert loop.orchestrator.pending is None


def test_a_batch_that_fails_leaves_the_step_before_pending(lazy_loop):
    """An exception in the next batch neither loses nor repeats the outcome of the step before."""
    hook = DeferredVeto()
    loop = settled_loop(lazy_loop, hook)
    drive(loop, 1.0)
    with loop.context(loss=torch.zeros(())) as ctx:
        loop.orchestrator(ctx, S.BEFORE_BATCH)
        with pytest.raises(TypeError, match="no graph"):
            loop.orchestrator(ctx, S.DO_BACKWARD)
    assert loop.orchestrator.resolve().skipped is False
    assert [batch for batch, *_ in hook.known] == [0, 1]


def test_settled_waits_for_the_end_of_the_stage(lazy_loop):
    """A child that asks at AFTER_OPTIMIZER_STEP learns the truth; ``settled`` still follows after the last child."""
    order = []

    class Asks(DeferredVeto):
        def after_optimizer_step(self, ctx, *, skipped):
            order.append(("after", self.label, ctx.step_skipped, ctx.veto_flag))

        def settled(self, ctx, *, skipped):
            order.append(("settled", self.label, skipped, None))

    loop = settled_loop(lazy_loop, Asks(1, label="a"), Asks(1, label="b"))
    order.clear()
    drive(loop, 1.0)
    assert order == [("after", "a", True, None), ("after", "b", True, None)] + [
        ("settled", "a", True, None),
        ("settled", "b", True, None),
    ]


def test_an_open_window_is_never_pending(lazy_loop):
    """A batch of an open window makes no step, so there is nothing to wait for, and ``settled`` is not called."""
    hook = DeferredVeto()
    loop = settled_loop(lazy_loop, hook)
    drive(loop, 1.0, window_complete=False)
    assert loop.orchestrator.pending is None
    assert loop.orchestrator.last_outcome.window_open
    assert len(hook.known) == 1


def test_kept_gradients_are_judged_by_the_outcome(lazy_loop, scale, folding_scaler):
    """Gradients that are to be kept at BEFORE_BATCH are refused after a step that was taken, and fine after a veto."""

    class Keep(DeferredVeto):
        def before_batch(self, ctx, *, will_skip):
            return ctx.batch_count != 2

    vetoed = settled_loop(lazy_loop, scale(folding_scaler()), Keep(1))
    drive(vetoed, 1.0)
    drive(vetoed, 1.0)
    taken = settled_loop(lazy_loop, scale(folding_scaler()), Keep())
    drive(taken, 1.0)
    with pytest.raises(TypeError, match="Gradients were to be kept"):
        drive(taken, 1.0)


def test_composing_keeps_lazy():
    """A composition is lazy if any part of it is, by ``+``, by nesting, and in another order."""
    lazy = TrainingUpdateOrchestrator(DeferredVeto(label="a"), lazy=True)
    assert (lazy + DeferredVeto(label="b")).lazy
    assert (DeferredVeto(label="b") + lazy).lazy
    assert TrainingUpdateOrchestrator(lazy).lazy
    assert lazy.with_priority({"a": 3}).lazy
    assert not TrainingUpdateOrchestrator(DeferredVeto()).lazy


def test_a_resolved_step_keeps_nothing_alive(lazy_loop):
    """Once resolved, nothing holds on to the context of a batch."""
    loop = settled_loop(lazy_loop, DeferredVeto())
    kept = weakref.ref(drive(loop, 1.0).window)
    drive(loop, 1.0)
    loop.orchestrator.resolve()
    drive(loop, 1.0)
    gc.collect()
    assert kept() is None


def test_later_contexts_are_not_bound_to_a_count_of_their_own(lazy_loop):
    """In a loop of one's own ``step_count`` is what the loop gave, before and after the step is resolved."""
    loop = settled_loop(lazy_loop, DeferredVeto())
    drive(loop, 1.0)
    with TrainContext(models={"main": loop.model}, optimizers=loop.optimizers, step_count=41) as ctx:
        loop.orchestrator(ctx, S.BEFORE_BATCH)
        assert ctx.step_count == 41
        assert loop.orchestrator.pending is not None
        assert ctx.step_skipped is False
        assert ctx.step_count == 41
