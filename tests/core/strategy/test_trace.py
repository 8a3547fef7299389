"""Tracing: every call is counted and timed while it is asked for, and costs nothing when it is not."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import sys
from typing import ClassVar

import pytest
import torch
from pydantic import BaseModel
from torch import nn

from nvalchemi.hooks import HookRegistry
from nvalchemi.training import HookTrace, OptimizerConfig, TrainingStage, TrainingStrategy
from nvalchemi.training.hooks import PassThrough, TrainingUpdateHook, TrainingUpdateOrchestrator


@pytest.fixture(autouse=True)
def unasked(monkeypatch):
    """Whoever runs these tests with a trace of everything does not trace twice."""
    monkeypatch.delenv("NVALCHEMI_HOOKS_TRACE", raising=False)


class HalfLoss(BaseModel, TrainingUpdateHook):
    """An update hook with methods, and pydantic's own ideas about attributes."""

    name: ClassVar[str] = "half"
    factor: float = 0.5

    def transform_loss(self, ctx, loss):
        return loss * self.factor

    def before_optimizer_step(self, ctx, *, will_skip):
        return ctx.batch_count != 1

    def settled(self, ctx, *, skipped):
        pass


class Whole(TrainingUpdateHook):
    """An update hook that is called as a whole."""

    reads_grad = False

    def __call__(self, ctx, stage, will_skip=False):
        return True, ctx.loss


class Every2:
    """A plain hook with a frequency."""

    frequency, stage = 2, TrainingStage.AFTER_BATCH

    def __call__(self, ctx, stage):
        pass


def plain(ctx, stage):
    """A function may be a hook as well."""


plain.frequency, plain.stage = 1, TrainingStage.BEFORE_FORWARD


def strategy(*hooks, optimizer="SGD", optimizer_kwargs=None, **options):
    torch.manual_seed(0)
    config = OptimizerConfig(optimizer_cls=optimizer, optimizer_kwargs=optimizer_kwargs or {"lr": 0.1})
    return TrainingStrategy(
        models=nn.Linear(2, 1), optimizer_configs=config,
        loss_fn=lambda predictions, batch: predictions.square().mean(), hooks=hooks, progress=False,
        **{"num_epochs": 1, **options},
    )  # fmt: skip


BATCHES = [torch.ones(3, 2) * n for n in range(1, 5)]


def counts(trace):
    return {(timing.hook, timing.stage): timing.calls for timing in trace.timings}


def test_every_call_of_every_kind_of_hook_is_counted():
    """Methods, whole calls, a frequency, a function: by hook and stage, as often as they really ran."""
    run = strategy(HalfLoss(), Whole(), Every2(), plain)
    with HookTrace(run) as trace:
        run.run(BATCHES)
    counted = counts(trace)
    assert {stage: counted["half", stage] for stage in ("DO_BACKWARD", "DO_OPTIMIZER_STEP", "settled")} == {
        "DO_BACKWARD": 4, "DO_OPTIMIZER_STEP": 4, "settled": 4,
    }  # fmt: skip
    stages = ["SETUP", "BEFORE_BATCH", "DO_BACKWARD", "DO_OPTIMIZER_STEP", "AFTER_OPTIMIZER_STEP"]
    assert [counted["whole", stage] for stage in stages] == [1, 4, 4, 4, 4]
    assert ("half", "SETUP") not in counted
    assert counted["Every2", "AFTER_BATCH"] == 1  # of three steps in four batches, the second
    assert counted["plain", "BEFORE_FORWARD"] == 4
    assert counted["TrainingUpdateOrchestrator", "DO_BACKWARD"] == 4


def test_times_add_up():
    """A hook's longest call is within its total, and the orchestrator's total holds those of its hooks."""
    run = strategy(HalfLoss())
    with HookTrace(run) as trace:
        run.run(BATCHES)
    times = {(one.hook, one.stage): one for one in trace.timings}
    assert all(0 < one.longest <= one.seconds for one in times.values())
    inner, outer = times["half", "DO_BACKWARD"], times["TrainingUpdateOrchestrator", "DO_BACKWARD"]
    assert inner.seconds < outer.seconds
    assert [one.seconds for one in trace.timings] == sorted((one.seconds for one in trace.timings), reverse=True)


def test_training_is_the_same_to_the_bit():
    """Vetoes, losses and order are what they are without a trace."""
    traced, free = strategy(HalfLoss(), Whole()), strategy(HalfLoss(), Whole())
    with HookTrace(traced):
        traced.run(BATCHES)
    free.run(BATCHES)
    assert traced.step_count == free.step_count == 3
    for one, other in zip(traced.models["main"].parameters(), free.models["main"].parameters(), strict=True):
        assert torch.equal(one, other)


def calls_of_two_batches(run):
    """Return the Python functions that two batches call."""
    called = []

    def watch(frame, event, argument):
        if event == "call":
            called.append((frame.f_code.co_filename, frame.f_code.co_name))

    with run.registry:
        run.train_batch(BATCHES[0])
        gc.disable()  # others have functions called when it collects
        sys.setprofile(watch)
        try:
            run.train_batch(BATCHES[1])
            run.train_batch(BATCHES[2])
        finally:
            sys.setprofile(None)
            gc.enable()
    return called


def test_what_is_not_traced_pays_nothing():
    """Before, after and without a trace training makes exactly the same calls, none of them in the tracer."""
    hooks = lambda: (HalfLoss(), Whole(), Every2(), plain)  # noqa: E731 - new ones, each time
    untouched, traced = strategy(*hooks()), strategy(*hooks())
    classes = [type(hook) for hook in traced.hooks]
    with HookTrace(traced), HookTrace(traced):  # one inside another, too
        assert any("hook_timing" in file for file, _ in calls_of_two_batches(traced))
    assert [type(hook) for hook in traced.hooks] == classes
    calls_of_two_batches(untouched)  # as many batches as the other has seen
    assert calls_of_two_batches(traced) == calls_of_two_batches(untouched)


def test_a_traced_hook_is_still_what_it_was():
    """Same class name, module and configuration; it is pickled and copied as what it is without a trace."""
    half, whole = HalfLoss(factor=0.25), Whole()
    whole.seen = 3
    run = strategy(half, whole)
    with HookTrace(run):
        assert isinstance(half, HalfLoss)
        assert [type(half).__qualname__, type(half).__module__, half.state_key] == ["HalfLoss", __name__, "half"]
        assert half.model_dump() == {"factor": 0.25}
        taken = run.state_dict()["hooks"]
        assert type(copy.deepcopy(half)) is HalfLoss
        assert type(copy.copy(whole)) is Whole
    run.setup()
    assert {key: hook["class"] for key, hook in taken.items()} == {
        key: hook["class"] for key, hook in run.state_dict()["hooks"].items()
    }


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_traced_hook_is_pickled_untraced(protocol):
    """Another process gets the hook itself, with its state, in every protocol of pickle."""
    hook = PassThrough()
    hook.seen = 3
    with HookTrace(TrainingUpdateOrchestrator(hook)):
        twin = pickle.loads(pickle.dumps(hook, protocol))
    assert (type(twin), twin.seen) == (PassThrough, 3)


def test_an_exception_in_a_traced_hook_is_counted_and_noted_as_ever():
    """The note names the hook and where it comes from; the trace is taken away."""

    class Fails(TrainingUpdateHook):
        def transform_loss(self, ctx, loss):
            raise RuntimeError("mine")

    hook = Fails()
    run = strategy(hook)
    with pytest.raises(RuntimeError, match="mine") as caught, HookTrace(run) as trace:
        run.run(BATCHES)
    assert caught.value.__notes__[0].startswith("In hook Fails (")
    assert counts(trace)["fails", "DO_BACKWARD"] == 1
    assert type(hook) is Fails


def test_each_call_is_logged_when_somebody_listens(caplog):
    """Batch, stage, hook, source and time stand on a line, and whether it said no."""
    run = strategy(HalfLoss(), Every2())
    with HookTrace(run), caplog.at_level(logging.DEBUG, logger="nvalchemi.hooks.trace"):
        run.run(BATCHES[:2])
    lines = [record.getMessage() for record in caplog.records if "half" in record.getMessage()]
    assert lines[0].startswith("batch 0, DO_BACKWARD: half (no distribution) took ")
    votes = [line for line in lines if "DO_OPTIMIZER_STEP" in line]
    assert [line.endswith("said no") for line in votes] == [False, True]


def test_the_log_does_not_make_a_lazy_step_known(caplog):
    """In lazy mode the host still does not ask for the outcome."""
    waits = []

    class Defers(TrainingUpdateHook):
        reads_grad, defers_veto = False, True

        def before_batch(self, ctx, *, will_skip):
            return True

        def transform_loss(self, ctx, loss):
            waits.append(run.orchestrator.pending is not None)  # the call before this one was logged
            return loss

        def before_optimizer_step(self, ctx, *, will_skip):
            ctx.defer_veto(torch.zeros(()), "never")
            return True

    run = strategy(Defers(), lazy=True, optimizer="AdamW", optimizer_kwargs={"fused": True})
    with HookTrace(run), caplog.at_level(logging.DEBUG, logger="nvalchemi.hooks.trace"), run.registry:
        for batch in BATCHES[:3]:
            run.train_batch(batch)
        assert run.orchestrator.pending is not None
    assert waits == [False, False, True]  # the first step is known at once: its state had yet to be made
    assert "defers" in caplog.text


@pytest.mark.parametrize("good", [True, False])
def test_the_environment_asks_for_a_table_after_each_run(monkeypatch, capsys, good):
    """``NVALCHEMI_HOOKS_TRACE=1`` prints it on standard error, also when the run failed; the hooks are as given."""
    monkeypatch.setenv("NVALCHEMI_HOOKS_TRACE", "1")
    run = strategy(HalfLoss(), Every2())
    assert [type(hook).__name__ for hook in run.hooks] == ["HalfLoss", "Every2"]
    if good:
        run.run(BATCHES)
    else:
        with pytest.raises(RuntimeError):
            run.run([*BATCHES[:2], torch.ones(3, 7)])
    out, err = capsys.readouterr()
    assert out == ""
    header, titles, *rows = err.splitlines()
    assert header.startswith("Time on the host in hooks")
    assert titles.split() == ["HOOK", "FROM", "STAGE", "CALLS", "TOTAL", "MS", "MEAN", "US", "LONGEST", "US"]
    assert any(row.split()[:5] == ["half", "no", "distribution", "DO_BACKWARD", "4" if good else "2"] for row in rows)
    assert "TraceReport" not in err


@pytest.mark.parametrize("value", ["", "0", "off"])
def test_no_table_is_printed_unasked(monkeypatch, capsys, value):
    """The variable has the same ways to say no as the other switches."""
    monkeypatch.setenv("NVALCHEMI_HOOKS_TRACE", value)
    strategy(HalfLoss()).run(BATCHES)
    assert capsys.readouterr().err == ""


def test_a_hook_that_cannot_be_traced_leaves_the_others_as_they_were():
    """A class that refuses subclasses is an error when tracing begins, and nothing stays behind."""

    class Final(TrainingUpdateHook):
        def __init_subclass__(cls, **options):
            raise TypeError("no subclasses, please")

    first, every = PassThrough(), Every2()
    run = strategy(first, every, Final())
    with pytest.raises(TypeError, match="no subclasses"), HookTrace(run):
        pass
    assert type(first) is PassThrough
    run.run(BATCHES)


def test_an_orchestrator_or_a_registry_alone_can_be_traced():
    """For loops of one's own; anything else is a TypeError that says what to give."""
    registry = HookRegistry(TrainingStage)
    registry.register(Every2())
    with HookTrace(registry) as trace:
        registry.dispatch(type("Context", (), {"step_count": 2}), TrainingStage.AFTER_BATCH)
    assert counts(trace) == {("Every2", "AFTER_BATCH"): 1}
    with pytest.raises(TypeError, match="HookTrace got a list; give a strategy, an orchestrator or a registry"):
        HookTrace([Every2()])
