"""Who is called at SETUP, BEFORE_BATCH and AFTER_OPTIMIZER_STEP, and what a wrong answer does."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import AlwaysVeto, TrainingUpdateHook, TrainingUpdateOrchestrator


class NumpyLikeBool:
    """Says yes when it is asked, as a bool of numpy does, and is none."""

    def __bool__(self):
        return True


NO_BOOLS = [1, 0, None, "yes", torch.tensor(True), NumpyLikeBool()]
GATED = ["BEFORE_BATCH", "DO_OPTIMIZER_STEP"]


def told(log, stage):
    """Return who was called at a stage, with the `will_skip` that they were told."""
    return [(label, will_skip) for label, at, will_skip in log if at == stage]


def test_setup_calls_every_child(recorder):
    """SETUP: every child, ``will_skip=False``, also one after a child that answers False there."""
    log = []
    hooks = recorder("a", log, votes={"SETUP": False}), recorder("b", log)
    TrainingUpdateOrchestrator(*hooks)(TrainContext(), TrainingStage.SETUP)
    assert log == [("a", "SETUP", False), ("b", "SETUP", False)]


def test_a_stage_that_is_not_claimed_changes_nothing(recorder, make_loop):
    """At a stage that the orchestrator does not claim no child is called and nothing changes."""
    hook = recorder()
    loop = make_loop(hook)
    loop.parameters[0].grad = torch.tensor(3.0)
    ctx = loop.context()
    for stage in TrainingStage:
        if not loop.orchestrator._runs_on_stage(stage):
            loop.orchestrator(ctx, stage)
    assert hook.log == []
    assert (loop.values, loop.grads) == ([1.0], [3.0])


def test_before_batch_zeroes_gradients_with_set_to_none(make_loop):
    """BEFORE_BATCH without a veto: gradients are zeroed, ``set_to_none=True``, of all optimizers."""
    loop = make_loop(weights=(1.0, 2.0), optimizers=lambda ps: [torch.optim.SGD([p]) for p in ps])
    for parameter in loop.parameters:
        parameter.grad = torch.tensor(3.0)
    loop.orchestrator(loop.context(), TrainingStage.BEFORE_BATCH)
    assert loop.grads == [None, None]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_any_veto_at_before_batch_keeps_gradients(make_loop, recorder, place):
    """BEFORE_BATCH with any veto, whoever's: gradients are kept as they are."""
    hooks = [recorder(label) for label in "abc"]
    hooks[place].votes = {"BEFORE_BATCH": False}
    loop = make_loop(*hooks)
    loop.parameters[0].grad = kept = torch.tensor(3.0)
    loop.orchestrator(loop.context(), TrainingStage.BEFORE_BATCH)
    assert loop.parameters[0].grad is kept
    assert kept.item() == 3.0


@pytest.mark.parametrize("stage", GATED)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_every_child_is_called_also_after_a_veto(make_loop, recorder, stage, place):
    """Every child is called, in order, also after a veto; ``will_skip`` says whether an earlier child vetoed."""
    log = []
    hooks = [recorder(label, log) for label in "abc"]
    hooks[place].votes = {stage: False}
    make_loop(*hooks).batch(1.0)
    assert told(log, stage) == [(label, position > place) for position, label in enumerate("abc")]


def test_a_veto_at_before_batch_is_none_of_the_step(make_loop, recorder):
    """A veto at BEFORE_BATCH keeps gradients; the optimizer still steps, and nobody is told of a skip there."""
    log = []
    loop = make_loop(recorder("a", log, votes={"BEFORE_BATCH": False}), recorder("b", log))
    ctx = loop.batch(1.0)
    assert loop.values == [0.0]
    assert not ctx.step_skipped
    assert told(log, "DO_OPTIMIZER_STEP") == [("a", False), ("b", False)]
    assert told(log, "AFTER_OPTIMIZER_STEP") == [("a", False), ("b", False)]


def test_gradients_that_are_kept_are_added_to(make_loop, recorder):
    """After a veto at BEFORE_BATCH the next backward pass adds to the gradients."""
    loop = make_loop(recorder(votes={"BEFORE_BATCH": False}))
    loop.batch(1.0)
    loop.batch(10.0)
    assert loop.grads == [11.0]
    assert loop.values == [1.0 - 1.0 - 11.0]


@pytest.mark.parametrize("vetoed", [False, True])
def test_after_optimizer_step_calls_every_child(make_loop, recorder, vetoed):
    """AFTER_OPTIMIZER_STEP: every child is called, also after a veto, with ``will_skip = optimizer_step_skipped``."""
    log = []
    hooks = [recorder(label, log) for label in "abc"] + ([AlwaysVeto()] if vetoed else [])
    loop = make_loop(*hooks)
    loop.batch(1.0)
    assert told(log, "AFTER_OPTIMIZER_STEP") == [("a", vetoed), ("b", vetoed), ("c", vetoed)]
    assert loop.orchestrator.optimizer_step_skipped is vetoed


@pytest.mark.parametrize("vetoed", [False, True])
def test_settled_is_called_once_a_step(make_loop, recorder, vetoed):
    """`settled` is called once a step, after every child's AFTER_OPTIMIZER_STEP, with what happened."""
    log = []
    loop = make_loop(recorder("a", log), recorder("b", log), *([AlwaysVeto()] if vetoed else []))
    loop.batch(1.0)
    assert log[-4:] == [
        ("a", "AFTER_OPTIMIZER_STEP", vetoed),
        ("b", "AFTER_OPTIMIZER_STEP", vetoed),
        ("a", "settled", vetoed),
        ("b", "settled", vetoed),
    ]


def test_both_forms_mix(make_loop, recorder):
    """Hooks that override ``__call__`` and hooks with stage methods mix in one orchestrator."""

    class Typed(TrainingUpdateHook):
        def __init__(self):
            self.told = []

        def before_optimizer_step(self, ctx, *, will_skip):
            self.told.append(will_skip)
            return True

    typed = Typed()
    make_loop(recorder(votes={"DO_OPTIMIZER_STEP": False}), typed).batch(1.0)
    assert typed.told == [True]


@pytest.mark.parametrize("stage", GATED)
@pytest.mark.parametrize("answer", NO_BOOLS, ids=lambda answer: type(answer).__name__)
def test_proceed_must_be_a_real_bool(make_loop, recorder, stage, answer):
    """`proceed` counts at these stages and must be a real `bool`: else a `TypeError` naming hook and stage."""
    loop = make_loop(recorder(votes={stage: answer}))
    with pytest.raises(TypeError, match=rf"Recorder returned .*{type(answer).__name__}.* at {stage}"):
        loop.batch(1.0)
    assert loop.values == [1.0]


def test_proceed_must_be_a_real_bool_in_an_open_window(make_loop, recorder):
    """In an open window too, an answer at DO_OPTIMIZER_STEP that is no bool is a `TypeError`."""
    with pytest.raises(TypeError, match="Recorder returned None .*DO_OPTIMIZER_STEP"):
        make_loop(recorder(votes={"DO_OPTIMIZER_STEP": None})).batch(1.0, window_complete=False)


@pytest.mark.parametrize("stage", ["SETUP", "DO_BACKWARD", "AFTER_OPTIMIZER_STEP"])
@pytest.mark.parametrize("answer", [None, False, 3])
def test_proceed_does_not_count_elsewhere(make_loop, recorder, stage, answer):
    """At the other stages `proceed` does not count, whatever it is."""
    loop = make_loop(recorder(votes={stage: answer}))
    loop.orchestrator(loop.context(), TrainingStage.SETUP)
    loop.batch(1.0)
    assert loop.values == [0.0]


@pytest.mark.parametrize("stage", GATED)
def test_the_loss_counts_at_do_backward_alone(make_loop, stage):
    """What a child returns as loss at another stage changes nothing."""

    class Odd(TrainingUpdateHook):
        def __call__(self, ctx, at, will_skip=False):
            return True, "no loss" if at.name == stage else ctx.loss

    loop = make_loop(Odd())
    ctx = loop.batch(1.0)
    assert ctx.loss.item() == 1.0
    assert loop.values == [0.0]


@pytest.mark.parametrize("stage", ["BEFORE_BATCH", "DO_BACKWARD", "DO_OPTIMIZER_STEP"])
@pytest.mark.parametrize("answer", [True, None, (True,), (True, None, None)])
def test_an_answer_that_is_no_pair_names_the_hook(make_loop, stage, answer):
    """A child that does not return ``(proceed, loss)`` where it counts is a `TypeError` that names hook and stage."""

    class Wrong(TrainingUpdateHook):
        def __call__(self, ctx, at, will_skip=False):
            return answer if at.name == stage else (True, ctx.loss)

    with pytest.raises(TypeError, match=f"Wrong.*{stage}"):
        make_loop(Wrong()).batch(1.0)
