"""A lazy strategy: exact wherever it is read, and never waiting where it makes no difference."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.errors import NoProgressError
from nvalchemi.training import OptimizerConfig, TrainingStage, Validation
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator

S = TrainingStage


class Deferred(TrainingUpdateHook):
    """Vetoes on the device the batches that it is told, and remembers which it knows of."""

    reads_grad = False
    defers_veto = True

    def __init__(self, *batches, every=False):
        self.batches, self.every = batches, every
        self.settled_at = []

    def before_optimizer_step(self, ctx, *, will_skip):
        ctx.defer_veto(torch.tensor(float(self.every or ctx.batch_count in self.batches)), "told so")
        return True

    def settled(self, ctx, *, skipped):
        self.settled_at.append((ctx.batch_count, ctx.step_count, skipped))


@pytest.fixture
def make_lazy(make_strategy):
    """A lazy strategy with a fused optimizer and a scheduler."""

    def make(*hooks, lazy=True, **options):
        config = OptimizerConfig(
            optimizer_kwargs={"lr": 0.1, "fused": True},
            scheduler_cls=torch.optim.lr_scheduler.ExponentialLR,
            scheduler_kwargs={"gamma": 0.5},
        )
        return make_strategy(*hooks, optimizer_configs=config, lazy=lazy, **options)

    return make


def pending_after(strategy, batches):
    """Train on batches one by one; say after each whether its step was left pending."""
    pending = []
    for batch in batches:
        strategy.train_batch(batch)
        pending.append(strategy.orchestrator.pending is not None)
    return pending


def test_steps_stay_pending_where_nobody_asks(make_lazy, batches):
    """After the first step, which makes the optimizer's state, no batch waits for its outcome."""
    strategy = make_lazy(Deferred())
    assert pending_after(strategy, batches) == [False, True, True, True]


def test_everything_that_is_read_is_exact(make_lazy, batches):
    """Counters, learning rates and outcomes read in a lazy run are those of an eager one, at every stage."""
    runs = []
    for lazy in (False, True):
        rows = []

        def note(ctx, stage, rows=rows):
            row = (stage.name, ctx.step_count, ctx.global_step_count, ctx.batch_count, ctx.step_skipped)
            rows.append((*row, [o.param_groups[0]["lr"] for o in ctx.optimizers], ctx.possible_step_counts))

        hook, spy = Deferred(1, 5), Spy(note)
        strategy = make_lazy(hook, spy, lazy=lazy, num_epochs=2)
        strategy.run(batches)
        counts = (strategy.step_count, strategy.global_step_count, strategy.batch_count, strategy.epoch)
        runs.append((rows, hook.settled_at, counts, strategy.optimizers[0].param_groups[0]["lr"]))
    assert runs[0] == runs[1]
    assert runs[0][2] == (6, 6, 8, 2)


class Spy:
    """A plain hook that is called at every stage where something can be read."""

    frequency = 1
    stage = None

    def __init__(self, do):
        self.do = do

    def _runs_on_stage(self, stage):
        return stage not in (S.SETUP, S.DO_BACKWARD, S.DO_OPTIMIZER_STEP)

    def __call__(self, ctx, stage):
        self.do(ctx, stage)


@pytest.mark.parametrize(
    "ask",
    [
        lambda strategy: strategy.step_count,
        lambda strategy: strategy.global_step_count,
        lambda strategy: strategy.optimizers,
        lambda strategy: strategy.lr_schedulers,
        lambda strategy: strategy.state_dict(),
        lambda strategy: strategy.validate([(torch.ones(2, 2), torch.ones(2, 1))]),
    ],
)
def test_whoever_reads_the_strategy_resolves(make_lazy, batches, ask):
    """Counters, optimizers, schedulers, a save and a validation resolve a pending step."""
    strategy = make_lazy(Deferred())
    pending_after(strategy, batches[:2])
    assert strategy.orchestrator.pending is not None
    ask(strategy)
    assert strategy.orchestrator.pending is None


def test_the_context_of_a_batch_counts_when_it_is_known(make_lazy, batches):
    """The context that `train_batch` returns has the counts after its step, whenever they are read."""
    strategy = make_lazy(Deferred(2))
    contexts = [strategy.train_batch(batch) for batch in batches]
    assert [ctx.step_count for ctx in contexts] == [1, 2, 2, 3]
    assert [ctx.step_skipped for ctx in contexts] == [False, False, True, False]


def test_after_optimizer_step_does_not_wait_for_its_own_step(make_lazy, plain, batches):
    """``ctx.step_count`` at AFTER_OPTIMIZER_STEP is the count before this step, and resolves nothing."""
    pending = []

    def note(ctx, stage):
        pending.append((ctx.step_count, ctx.workflow.orchestrator.pending is not None))

    strategy = make_lazy(Deferred(1), plain(note, S.AFTER_OPTIMIZER_STEP))
    for batch in batches:
        strategy.train_batch(batch)
    assert pending == [(0, False), (1, True), (1, True), (2, True)]


def test_a_frequency_resolves_only_where_it_makes_a_difference(make_lazy, plain, batches):
    """A hook with a frequency runs at the same counts as in an eager run; in between nothing waits for it."""
    runs = []
    for lazy in (False, True):
        ran = []
        every = plain(lambda ctx, stage, ran=ran: ran.append((ctx.batch_count, ctx.step_count)), S.AFTER_BATCH)
        every.frequency = 4
        strategy = make_lazy(Deferred(2), every, lazy=lazy)
        pending = pending_after(strategy, batches * 2)
        runs.append(ran)
    assert runs[0] == runs[1] == [(5, 4)]
    assert pending == [False, True, True, True, False, True, True, True]


def test_the_length_of_a_run_in_steps_is_exact(make_lazy, batches):
    """`num_steps` counts executed steps; the run stops after exactly the batch that makes the last of them."""
    strategy = make_lazy(Deferred(1, 4), num_epochs=None, num_steps=5)
    strategy.run(batches)
    assert (strategy.step_count, strategy.batch_count) == (5, 7)


def test_the_goal_is_asked_about_only_when_it_may_be_reached(make_lazy, batches):
    """Before the last steps a run in steps does not wait."""
    hook = Deferred()
    strategy = make_lazy(hook, num_epochs=None, num_steps=3)
    known = []
    spy = Spy(lambda ctx, stage: known.append(len(hook.settled_at)) if stage is S.BEFORE_BATCH else None)
    strategy.registry.register(spy)
    strategy.run(batches)
    assert known == [0, 1, 1]  # the second batch ended unresolved
    assert strategy.step_count == 3


def test_validation_by_steps_is_exact(make_lazy, plain, batches):
    """Validation every n steps happens after the same steps as in an eager run."""
    runs = []
    for lazy in (False, True):
        seen = []
        spy = plain(lambda ctx, stage, seen=seen: seen.append((ctx.step_count, ctx.batch_count)), S.AFTER_VALIDATION)
        validation = Validation(loader=batches[:1], every_steps=3)
        strategy = make_lazy(Deferred(1, 5), spy, lazy=lazy, validation=validation, num_epochs=3)
        strategy.run(batches)
        runs.append(seen)
    assert runs[0] == runs[1]
    assert [step for step, _ in runs[0]] == [3, 6, 9]


def test_validation_by_steps_waits_only_when_it_may_be_due(make_lazy, batches):
    """Between two validations the cadence resolves nothing."""
    hook = Deferred()
    strategy = make_lazy(hook, validation=Validation(loader=batches[:1], every_steps=4), num_epochs=1)
    known = []
    spy = Spy(lambda ctx, stage: known.append(len(hook.settled_at)) if stage is S.BEFORE_BATCH else None)
    strategy.registry.register(spy)
    strategy.run(batches)
    assert known == [0, 1, 1, 2]


def test_a_pass_without_a_step_is_still_found(make_lazy, batches):
    """A pass in which every step was vetoed on the device stops the run and names who vetoed, with every count."""
    strategy = make_lazy(Deferred(0, 1, 2, 3), num_epochs=2)
    first = Deferred(*range(4, 8))
    with pytest.raises(NoProgressError, match=r"vetoed by deferred \(told so\) 4 times"):
        strategy.run(batches)
    going = make_lazy(first, num_epochs=3)
    with pytest.raises(NoProgressError, match=r"4 batches.*vetoed by deferred \(told so\) 4 times"):
        going.run(batches)
    assert going.step_count == 4


def test_a_failure_of_settled_ends_the_run(make_lazy, batches):
    """What ``settled`` raises about the last step of a run is raised by the run, before AFTER_TRAINING."""

    class Fails(Deferred):
        def settled(self, ctx, *, skipped):
            if ctx.batch_count == 3:
                raise OSError("of the last step")

    strategy = make_lazy(Fails(), num_epochs=1)
    with pytest.raises(OSError, match="of the last step"):
        strategy.run(batches)
    assert strategy.step_count == 4
    assert strategy.batch_count == 4


def test_a_run_that_fails_settles_its_last_step(make_lazy, plain, batches):
    """An exception in a batch ends the run with the step before it counted and settled."""
    hook = Deferred()

    def fail(ctx, stage):
        if ctx.batch_count == 2:
            raise ZeroDivisionError("mine")

    strategy = make_lazy(hook, plain(fail, S.BEFORE_FORWARD), num_epochs=1)
    with pytest.raises(ZeroDivisionError, match="mine"):
        strategy.run(batches)
    assert hook.settled_at == [(0, 0, False), (1, 1, False)]
    assert strategy.step_count == 2


def test_a_state_taken_while_a_step_is_pending_is_exact(make_lazy, batches):
    """A state taken from a lazy run equals that of an eager one, and goes on to the same weights."""
    ends = []
    for lazy in (False, True):
        torch.manual_seed(0)
        first = make_lazy(Deferred(2), lazy=lazy)
        for batch in batches[:3]:
            first.train_batch(batch)
        state = first.state_dict()
        second = make_lazy(Deferred(), lazy=lazy)
        second.load_state_dict(state)
        for batch in batches[3:]:
            second.train_batch(batch)
        ends.append((state["run"]["counters"], second.step_count, second.state_dict()["models"]))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)


def test_loading_leaves_a_pending_step_behind(make_lazy, batches):
    """A state loaded while a step is pending is not changed by that step's outcome."""
    strategy = make_lazy(Deferred())
    pending_after(strategy, batches[:2])
    state = strategy.state_dict()
    pending_after(strategy, batches[:2])
    strategy.load_state_dict(state)
    assert strategy.orchestrator.pending is None
    assert strategy.step_count == 2
    assert strategy.optimizers[0].param_groups[0]["lr"] == 0.025


def test_an_orchestrator_that_is_lazy_makes_the_strategy_lazy(make_strategy, batches):
    """A lazy orchestrator among the hooks is used as it is; ``lazy=True`` makes an eager one lazy."""
    lazy = TrainingUpdateOrchestrator(Deferred(), lazy=True)
    assert make_strategy(lazy).orchestrator is lazy
    assert make_strategy(TrainingUpdateOrchestrator(Deferred()), lazy=True).orchestrator.lazy
    assert not make_strategy(Deferred()).orchestrator.lazy
