"""What an orchestrator is made of, and what it refuses."""

from __future__ import annotations

import pytest

from nvalchemi.hooks import CheckpointableHook, Hook, HookRegistry
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import AlwaysVeto, PassThrough, TrainingUpdateHook, TrainingUpdateOrchestrator

CLAIMED = {"SETUP", "BEFORE_BATCH", "DO_BACKWARD", "DO_OPTIMIZER_STEP", "AFTER_OPTIMIZER_STEP"}


class Stateful(TrainingUpdateHook):
    """Has a state."""

    def __init__(self, count=0):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Fp16(TrainingUpdateHook):
    """One of a family."""

    exclusive_family = "precision"


class Bf16(TrainingUpdateHook):
    """The other one."""

    exclusive_family = "precision"


class PlainHook:
    """A hook that takes no part in the update."""

    frequency = 1
    stage = TrainingStage.AFTER_BATCH

    def __call__(self, ctx, stage):
        """Do nothing."""


def keys(orchestrator):
    return [hook.state_key for hook in orchestrator.iter_hooks()]


def labels(*names):
    return [PassThrough().labelled(name) for name in names]


def test_it_satisfies_hook():
    """`frequency = 1`, `stage = None`, satisfies `Hook`."""
    orchestrator = TrainingUpdateOrchestrator()
    assert isinstance(orchestrator, Hook)
    assert (orchestrator.frequency, orchestrator.stage) == (1, None)


def test_the_stages_it_claims():
    """It claims BEFORE_BATCH, DO_BACKWARD, DO_OPTIMIZER_STEP, AFTER_OPTIMIZER_STEP, and is also called at SETUP."""
    orchestrator = TrainingUpdateOrchestrator(PassThrough())
    assert {stage.name for stage in TrainingStage if orchestrator._runs_on_stage(stage)} == CLAIMED


def test_it_owns_the_slots():
    """In a registry it owns DO_BACKWARD and DO_OPTIMIZER_STEP, and a second one is refused."""
    slots = (TrainingStage.DO_BACKWARD, TrainingStage.DO_OPTIMIZER_STEP)
    registry = HookRegistry(TrainingStage, slots=slots)
    orchestrator = TrainingUpdateOrchestrator()
    registry.register(orchestrator)
    assert [registry.owner(slot) for slot in slots] == [orchestrator, orchestrator]
    with pytest.raises(ValueError, match="DO_BACKWARD.*TrainingUpdateOrchestrator owns already"):
        registry.register(TrainingUpdateOrchestrator())


def test_orchestrators_are_flattened():
    """Orchestrators are flattened, however deep."""
    a, b, c, d = labels(*"abcd")
    inner = TrainingUpdateOrchestrator(TrainingUpdateOrchestrator(b), c)
    assert list(TrainingUpdateOrchestrator(a, inner, d).iter_hooks()) == [a, b, c, d]


@pytest.mark.parametrize(
    ("arguments", "position", "kind", "remedy"),
    [
        ((3,), 0, "a int", "subclasses of TrainingUpdateHook"),
        ((PassThrough(), None), 1, "a NoneType", "subclasses of TrainingUpdateHook"),
        (([PassThrough()],), 0, "a list", r"unpack it: TrainingUpdateOrchestrator\(\*hooks\)"),
        (((PassThrough(),),), 0, "a tuple", r"unpack it: TrainingUpdateOrchestrator\(\*hooks\)"),
        ((PassThrough(), AlwaysVeto), 1, "the class AlwaysVeto", r"make an instance: AlwaysVeto\(...\)"),
        ((PassThrough(), PlainHook()), 1, "a PlainHook", "plain hook; give it to the strategy"),
        (("ema",), 0, "a str", "names are for a strategy"),
    ],
)
def test_a_wrong_argument(arguments, position, kind, remedy):
    """A wrong argument is a `TypeError` naming its position and type, and what to do."""
    with pytest.raises(TypeError, match=f"Argument {position} .* is {kind}, .*{remedy}"):
        TrainingUpdateOrchestrator(*arguments)


def test_two_members_of_one_family():
    """Two members of one exclusive family are a `ValueError` naming both."""
    with pytest.raises(ValueError, match="Fp16 and Bf16 .*'precision'"):
        TrainingUpdateOrchestrator(Fp16(), PassThrough(), Bf16())


def test_members_of_no_family_do_not_exclude_each_other():
    """Hooks without a family do not exclude each other."""
    assert keys(TrainingUpdateOrchestrator(PassThrough(), AlwaysVeto(), Fp16())) == [
        "pass_through",
        "always_veto",
        "fp16",
    ]


def test_indistinguishable_twins():
    """Two instances with one state key are refused, and labels tell them apart."""
    with pytest.raises(ValueError, match="PassThrough and PassThrough .*'pass_through'.*labelled"):
        TrainingUpdateOrchestrator(PassThrough(), PassThrough())
    assert keys(TrainingUpdateOrchestrator(PassThrough(), PassThrough().labelled("second"))) == [
        "pass_through",
        "second",
    ]


def test_the_same_instance_twice():
    """One instance given twice is a `ValueError`, also through an orchestrator."""
    hook = PassThrough()
    with pytest.raises(ValueError, match="same PassThrough was given twice"):
        TrainingUpdateOrchestrator(hook, hook)
    with pytest.raises(ValueError, match="same PassThrough was given twice"):
        TrainingUpdateOrchestrator(hook) + hook


def test_no_hooks_at_all(make_loop):
    """No hooks at all is legal: gradients are zeroed, backward runs, the optimizer steps."""
    loop = make_loop()
    loop.batch(3.0)
    loop.batch(5.0)
    assert loop.values == [1.0 - 3.0 - 5.0]
    assert list(loop.orchestrator.iter_hooks()) == []


def test_plus_composes_hooks_and_orchestrators():
    """`a + b` composes hooks and orchestrators into a flat orchestrator, whichever stands left."""
    a, b, c, d = labels(*"abcd")
    assert list((a + b).iter_hooks()) == [a, b]
    assert list(((a + b) + c).iter_hooks()) == [a, b, c]
    assert list((a + (b + c)).iter_hooks()) == [a, b, c]
    assert list(((a + b) + (c + d)).iter_hooks()) == [a, b, c, d]
    assert isinstance(a + b, TrainingUpdateOrchestrator)


def test_sum_works():
    """`sum(hooks)` works, of hooks, of orchestrators, and of one."""
    a, b, c = labels(*"abc")
    assert list(sum([a, b, c]).iter_hooks()) == [a, b, c]
    assert list(sum([a]).iter_hooks()) == [a]
    assert list(sum([a + b, TrainingUpdateOrchestrator(c)]).iter_hooks()) == [a, b, c]


@pytest.mark.parametrize("wrong", [3, "ema", [PassThrough()]])
def test_plus_refuses_what_is_no_update_hook(wrong):
    """Adding anything else is a `TypeError` that names its place, on either side."""
    with pytest.raises(TypeError, match="Argument 1 .*no update hook"):
        AlwaysVeto() + wrong
    with pytest.raises(TypeError, match="no update hook"):
        TrainingUpdateOrchestrator(AlwaysVeto()) + wrong
    with pytest.raises(TypeError, match="no update hook"):
        1 + AlwaysVeto()


def test_composing_leaves_the_parts_as_they_were():
    """`+` makes a new orchestrator and changes neither side."""
    a, b = labels(*"ab")
    left = TrainingUpdateOrchestrator(a)
    assert left + b is not left
    assert list(left.iter_hooks()) == [a]


def test_state_dict():
    """The state holds one section per hook that has one, under its `state_key`."""
    orchestrator = TrainingUpdateOrchestrator(Stateful(3), PassThrough(), Stateful(5).labelled("second"))
    assert orchestrator.state_dict() == {"stateful": {"count": 3}, "second": {"count": 5}}
    assert isinstance(orchestrator, CheckpointableHook)


def test_load_state_dict():
    """A state goes back to the hooks it came from, in whatever order they are composed."""
    state = TrainingUpdateOrchestrator(Stateful(3), Stateful(5).labelled("second")).state_dict()
    first, second = Stateful(), Stateful().labelled("second")
    TrainingUpdateOrchestrator(second, first).load_state_dict(state)
    assert (first.count, second.count) == (3, 5)


@pytest.mark.parametrize("state", [{}, {"other": {"count": 1}}, {"stateful": {"count": 1}, "gone": {}}])
def test_a_state_of_other_hooks_is_refused(state):
    """A state that does not belong to these hooks is a `ValueError` that names both, and nothing is loaded."""
    hook = Stateful(7)
    with pytest.raises(ValueError, match="stateful"):
        TrainingUpdateOrchestrator(hook).load_state_dict(state)
    assert hook.count == 7
