"""In which order children are called, and how an orchestrator explains it."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from nvalchemi.errors import HookContractError
from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import AlwaysVeto, PassThrough, TrainingUpdateHook, TrainingUpdateOrchestrator

STAGES = ("SETUP", "BEFORE_BATCH", "DO_BACKWARD", "DO_OPTIMIZER_STEP", "AFTER_OPTIMIZER_STEP", "settled")


def keys(orchestrator):
    return [hook.state_key for hook in orchestrator.iter_hooks()]


def prioritised(**priorities):
    hooks = []
    for label, priority in priorities.items():
        hook = PassThrough().labelled(label)
        hook.priority = priority
        hooks.append(hook)
    return hooks


def test_lower_priorities_act_first():
    """Priorities, lower first; `iter_hooks` gives the children in dispatch order."""
    assert keys(TrainingUpdateOrchestrator(*prioritised(late=50, early=10, middle=30))) == ["early", "middle", "late"]


def test_ties_keep_insertion_order():
    """Ties keep insertion order, also through composition."""
    a, b, c = prioritised(a=50, b=50, c=50)
    assert keys(TrainingUpdateOrchestrator(c, a, b)) == ["c", "a", "b"]
    assert keys(c + (b + a)) == ["c", "b", "a"]


def test_every_stage_is_dispatched_in_this_order(make_loop, recorder):
    """Children are called in the order of `iter_hooks` at every stage."""
    log = []
    loop = make_loop(*(recorder(label, log, priority=p) for label, p in [("c", 50), ("a", 10), ("b", 30)]))
    loop.orchestrator(loop.context(), TrainingStage.SETUP)
    loop.batch(1.0)
    for stage in STAGES:
        assert [label for label, at, _ in log if at == stage] == ["a", "b", "c"], stage


def test_all_120_orders_of_insertion(recorder):
    """Five hooks, two of equal priority: different priorities always run alike, equal ones in registration order."""
    for order in permutations([("a", 10), ("b", 20), ("x", 30), ("y", 30), ("c", 50)]):
        ties = [label for label, priority in order if priority == 30]
        orchestrator = TrainingUpdateOrchestrator(*(recorder(label, priority=p) for label, p in order))
        assert keys(orchestrator) == ["a", "b", *ties, "c"]


def test_with_priority():
    """`with_priority({key: n})` overrides the priority of one hook in a new orchestrator."""
    original = TrainingUpdateOrchestrator(*prioritised(a=10, b=20, c=30))
    changed = original.with_priority({"a": 25})
    assert keys(changed) == ["b", "a", "c"]
    assert keys(original) == ["a", "b", "c"]
    assert [hook.priority for hook in changed.iter_hooks()] == [20, 10, 30]  # the hooks themselves are left alone


def test_priorities_add_up_and_survive_composition():
    """Overrides add up, and stay with their hooks in a larger composition."""
    orchestrator = (
        TrainingUpdateOrchestrator(*prioritised(a=10, b=20)).with_priority({"a": 60}).with_priority({"b": 70})
    )
    assert keys(orchestrator) == ["a", "b"]
    assert keys(orchestrator + prioritised(c=65)[0]) == ["a", "c", "b"]


def test_ties_after_an_override_keep_insertion_order():
    """An override that makes a tie falls back on the order of insertion, not on the order before."""
    assert keys(TrainingUpdateOrchestrator(*prioritised(late=50, early=10)).with_priority({"early": 50})) == [
        "late",
        "early",
    ]


def test_a_priority_for_nobody():
    """A priority for a key that no hook has is a `ValueError` naming the closest one."""
    with pytest.raises(ValueError, match="'pass_thru'.*did you mean 'pass_through'"):
        TrainingUpdateOrchestrator(PassThrough()).with_priority({"pass_thru": 3})


@pytest.mark.parametrize("priority", [True, 2.5, "10", None])
def test_a_priority_that_is_no_int(priority):
    """A priority that is not an int is a `ValueError` with its value."""
    with pytest.raises(ValueError, match=f"'pass_through' is {priority!r}; it must be an int"):
        TrainingUpdateOrchestrator(PassThrough()).with_priority({"pass_through": priority})


class Halve(TrainingUpdateHook):
    """Acts at one stage only."""

    def transform_loss(self, ctx, loss):
        return loss * 0.5


class Keep(TrainingUpdateHook):
    """May veto at BEFORE_BATCH."""

    priority = 10

    def before_batch(self, ctx, *, will_skip):
        return False


def test_explain_names_order_and_stages():
    """`explain()` gives the order, and for each child the stages at which it acts."""
    explained = TrainingUpdateOrchestrator(Halve(), AlwaysVeto(), Keep()).explain().hooks
    assert [(hook.key, hook.priority) for hook in explained] == [("keep", 10), ("halve", 50), ("always_veto", 50)]
    assert [hook.stages for hook in explained] == [("BEFORE_BATCH",), ("DO_BACKWARD",), ("DO_OPTIMIZER_STEP",)]


def test_explain_says_who_may_veto():
    """`explain()` says who may veto."""
    explained = TrainingUpdateOrchestrator(Halve(), AlwaysVeto(), Keep()).explain().hooks
    assert {hook.key: hook.may_veto for hook in explained} == {"keep": True, "halve": False, "always_veto": True}


class Offering(TrainingUpdateHook):
    """Prepares something before the step; vetoes all the same if it is told to."""

    may_veto = False
    defers_veto = True

    def __init__(self, how=""):
        self.how = how

    def before_optimizer_step(self, ctx, *, will_skip):
        if self.how == "defers":
            ctx.defer_veto(torch.tensor(1.0), "a whim")
        return self.how != "returns"


def test_a_hook_that_only_prepares_says_so_and_is_held_to_it():
    """With may_veto = False it counts as one that never vetoes, and a veto of it is an error, returned or deferred."""
    (explained,) = TrainingUpdateOrchestrator(Offering()).explain().hooks
    assert not explained.may_veto
    for how, message in (
        ("returns", "Offering vetoed at DO_OPTIMIZER_STEP"),
        ("defers", "Offering, whose may_veto is"),
    ):
        orchestrator, weight = TrainingUpdateOrchestrator(Offering(how)), torch.nn.Parameter(torch.ones(1))
        with TrainContext(optimizers=[torch.optim.SGD([weight])]) as ctx:
            orchestrator(ctx, TrainingStage.BEFORE_BATCH)
            ctx.loss = weight.sum()
            orchestrator(ctx, TrainingStage.DO_BACKWARD)
            with pytest.raises(HookContractError, match=message):
                orchestrator(ctx, TrainingStage.DO_OPTIMIZER_STEP)


def test_explain_treats_a_hook_with_its_own_call_as_one_of_every_stage(recorder):
    """A hook that overrides ``__call__`` acts at every stage, and may veto."""
    (hook,) = TrainingUpdateOrchestrator(recorder()).explain().hooks
    assert hook.may_veto
    assert {"BEFORE_BATCH", "DO_BACKWARD", "DO_OPTIMIZER_STEP", "AFTER_OPTIMIZER_STEP"} <= set(hook.stages)


def test_explain_gives_the_reason_of_the_order():
    """`explain()` gives the reason of each place: the table's, the user's, or the hook's own."""
    orchestrator = TrainingUpdateOrchestrator(*prioritised(table=30, user=50, own=33)).with_priority({"user": 60})
    reasons = {hook.key: hook.reason for hook in orchestrator.explain().hooks}
    assert "true and finite gradients" in reasons["table"]
    assert "user" in reasons["user"]
    assert "own" in reasons["own"]


def test_explain_says_from_which_distribution():
    """`explain()` says from which distribution each child comes."""
    explained = TrainingUpdateOrchestrator(Halve(), PassThrough()).explain().hooks
    assert explained[0].source == "no distribution"
    assert explained[1].source.startswith(("nvalchemi-hooks ", "no distribution"))


def test_explain_reads_as_a_table():
    """``str()`` of it is a table to read, and says what happens without hooks."""
    text = str(TrainingUpdateOrchestrator(Halve(), AlwaysVeto()).explain())
    assert text.index("halve") < text.index("always_veto")
    assert "never vetoes" in text
    assert "may veto" in text
    assert "zeroed" in str(TrainingUpdateOrchestrator().explain())


class ReadsGradients(TrainingUpdateHook):
    """Looks at ``.grad`` before the step."""

    def before_optimizer_step(self, ctx, *, will_skip):
        return True


def test_explain_says_whether_steps_are_folded():
    """`explain()` says whether the step can be folded, and which hooks read gradients before it."""
    reader = str(TrainingUpdateOrchestrator(ReadsGradients(), AlwaysVeto()).explain())
    folded = str(TrainingUpdateOrchestrator(PassThrough(), AlwaysVeto()).explain())
    assert "fold" in reader
    assert "fold" in folded
    assert "reads" in next(line for line in reader.splitlines() if "ReadsGradients" in line)
    assert "reads" not in next(line for line in folded.splitlines() if "AlwaysVeto" in line)
