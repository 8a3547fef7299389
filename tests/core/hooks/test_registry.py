"""The registry: what is refused when a hook joins, and what is called when."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace

import pytest

from nvalchemi.hooks import HookRegistry
from nvalchemi.training import TrainingStage

SLOTS = (TrainingStage.DO_BACKWARD, TrainingStage.DO_OPTIMIZER_STEP)


class OtherStage(Enum):
    """Another engine's stages, with a name in common."""

    AFTER_BATCH = 1


class Hook:
    """Writes down when it is called."""

    def __init__(self, stage=TrainingStage.AFTER_BATCH, frequency=1, log=None, name="hook"):
        self.stage, self.frequency, self.name = stage, frequency, name
        self.log = [] if log is None else log

    def __call__(self, ctx, stage):
        self.log.append((self.name, getattr(ctx, "step_count", None), stage.name))


class Everywhere(Hook):
    """Says by itself where it runs."""

    def __init__(self, *stages, **options):
        super().__init__(None, **options)
        self.stages, self.asked = stages, []

    def _runs_on_stage(self, stage):
        self.asked.append(stage)
        return stage in self.stages


@pytest.fixture
def registry():
    """A registry as training has it."""
    return HookRegistry(TrainingStage, slots=SLOTS, owners_last=(TrainingStage.SETUP,))


def at(step_count):
    return SimpleNamespace(step_count=step_count)


# Dispatch.


def test_a_hook_is_called_at_its_stage_alone(registry):
    """A hook with a `stage` is called at that stage and at no other."""
    registry.register(hook := Hook())
    for stage in TrainingStage:
        registry.dispatch(at(0), stage)
    assert hook.log == [("hook", 0, "AFTER_BATCH")]


def test_a_hook_without_a_stage_says_where_it_runs(registry):
    """A hook with ``stage is None`` runs where `_runs_on_stage` says, which is asked once a stage, at registration."""
    registry.register(hook := Everywhere(TrainingStage.SETUP, TrainingStage.AFTER_EPOCH))
    assert hook.asked == list(TrainingStage)
    for stage in TrainingStage:
        registry.dispatch(at(0), stage)
    assert [stage for _, _, stage in hook.log] == ["SETUP", "AFTER_EPOCH"]
    assert hook.asked == list(TrainingStage)


def test_hooks_are_called_in_the_order_of_registration(registry):
    """Hooks of one stage are called in the order in which they were registered."""
    log = []
    for name in "bac":
        registry.register(Hook(log=log, name=name))
    registry.dispatch(at(0), TrainingStage.AFTER_BATCH)
    assert [name for name, _, _ in log] == ["b", "a", "c"]
    assert [hook.name for hook in registry] == ["b", "a", "c"]
    assert len(registry) == 3


def test_at_setup_plain_hooks_come_first(registry):
    """At SETUP plain hooks come before the owner of the slots, whoever was registered first; elsewhere it is first."""
    log = []
    both = (TrainingStage.SETUP, TrainingStage.BEFORE_BATCH)
    registry.register(Everywhere(TrainingStage.BEFORE_BATCH, TrainingStage.SETUP, log=log, name="a"))
    registry.register(Everywhere(*both, *SLOTS, log=log, name="owner"))
    registry.register(Everywhere(*both, log=log, name="b"))
    for stage in both:
        registry.dispatch(at(0), stage)
    assert [name for name, _, stage in log if stage == "SETUP"] == ["a", "b", "owner"]
    assert [name for name, _, stage in log if stage == "BEFORE_BATCH"] == ["owner", "a", "b"]


def test_a_stage_without_hooks(registry):
    """A stage at which no hook runs is dispatched to nobody."""
    registry.dispatch(at(0), TrainingStage.AFTER_EPOCH)
    assert len(registry) == 0


def test_an_error_says_from_which_hook_it_comes(registry):
    """An exception in a hook carries a note with hook, stage and step."""

    class Fails(Hook):
        def __call__(self, ctx, stage):
            raise ZeroDivisionError

    registry.register(Hook())
    registry.register(Fails())
    with pytest.raises(ZeroDivisionError) as caught:
        registry.dispatch(at(4), TrainingStage.AFTER_BATCH)
    assert caught.value.__notes__ == ["In hook Fails (no installed distribution), stage AFTER_BATCH, step 4."]


# Frequency.


def test_frequency_one_runs_at_every_dispatch(registry):
    """``frequency = 1`` runs at every dispatch, also when several batches share the step count."""
    registry.register(hook := Hook())
    for count in (0, 0, 1, 1, 1):
        registry.dispatch(at(count), TrainingStage.AFTER_BATCH)
    assert [count for _, count, _ in hook.log] == [0, 0, 1, 1, 1]


def test_frequency_n_runs_at_every_nth_step(registry):
    """``frequency = n`` runs when ``step_count % n == 0``."""
    registry.register(hook := Hook(frequency=3))
    for count in range(10):
        registry.dispatch(at(count), TrainingStage.AFTER_BATCH)
    assert [count for _, count, _ in hook.log] == [0, 3, 6, 9]


def test_frequency_n_runs_once_a_step_count(registry):
    """It runs once per value of `step_count`, also when several batches share it (accumulation, skipped steps)."""
    registry.register(hook := Hook(frequency=2))
    for count in (0, 0, 0, 1, 2, 2, 3, 4):
        registry.dispatch(at(count), TrainingStage.AFTER_BATCH)
    assert [count for _, count, _ in hook.log] == [0, 2, 4]


def test_frequency_n_runs_once_a_stage(registry):
    """It runs once per value of `step_count` and stage: each stage counts for itself."""
    registry.register(hook := Everywhere(TrainingStage.BEFORE_BATCH, TrainingStage.AFTER_BATCH, frequency=2))
    for count in (0, 0, 1, 2, 2):
        registry.dispatch(at(count), TrainingStage.BEFORE_BATCH)
        registry.dispatch(at(count), TrainingStage.AFTER_BATCH)
    assert [(count, stage) for _, count, stage in hook.log] == [
        (0, "BEFORE_BATCH"),
        (0, "AFTER_BATCH"),
        (2, "BEFORE_BATCH"),
        (2, "AFTER_BATCH"),
    ]


# Refusals.


@pytest.mark.parametrize("frequency", [0, -1, True, False, 1.0, "1", None])
def test_frequency_must_be_an_int_of_one_or_more(registry, frequency):
    """A `frequency` that is not an int >= 1 is refused with its value; a bool is not an int here."""
    with pytest.raises(ValueError, match=rf"Hook\.frequency is {frequency!r}; it must be an int of 1 or more"):
        registry.register(Hook(frequency=frequency))


@pytest.mark.parametrize("stage", [OtherStage.AFTER_BATCH, "AFTER_BATCH", 15])
def test_a_stage_of_another_enum(registry, stage):
    """A stage of another enum, or of none, is refused with the stages there are."""
    with pytest.raises(ValueError, match=r"Hook\.stage is .*AFTER_BATCH.*|Hook\.stage is 15.*SETUP"):
        registry.register(Hook(stage))


def test_no_stage_at_all(registry):
    """No stage at all, neither `stage` nor `_runs_on_stage`, is refused with what to write."""
    with pytest.raises(ValueError, match="Hook runs at no stage.*missing.*`_runs_on_stage`"):
        registry.register(Hook(None))
    with pytest.raises(ValueError, match="Everywhere runs at no stage.*False for every stage"):
        registry.register(Everywhere())


def test_the_same_instance_twice(registry):
    """The same instance twice is refused, by identity; an equal one is another hook."""

    class Equal(Hook):
        def __eq__(self, other):
            return True

        __hash__ = None

    registry.register(hook := Equal())
    with pytest.raises(ValueError, match="Equal is registered already"):
        registry.register(hook)
    registry.register(Equal())
    assert len(registry) == 2


@pytest.mark.parametrize("slot", SLOTS)
def test_two_owners_of_a_slot(registry, slot):
    """Two owners of a DO_ slot are refused, with the name of the first and of the slot."""
    registry.register(Everywhere(*SLOTS))
    with pytest.raises(ValueError, match=rf"Hook claims {slot.name}, which Everywhere owns already"):
        registry.register(Hook(slot))


@pytest.mark.parametrize("wrong", [object(), None, 3, "ema", Hook, lambda ctx, stage: None])
def test_what_is_no_hook(registry, wrong):
    """What is no hook, a class included, is refused with what is missing."""
    with pytest.raises(ValueError, match="is no hook: it (has no|is a class)"):
        registry.register(wrong)


@pytest.mark.parametrize(
    "wrong",
    [Hook(frequency=0), Hook("AFTER_BATCH"), Hook(None), Hook(TrainingStage.DO_BACKWARD), Everywhere(*TrainingStage)],
)
def test_a_refused_registration_leaves_everything_as_it_was(registry, wrong):
    """A refused registration leaves everything as it was: hooks, owners, and what is called."""
    registry.register(first := Everywhere(TrainingStage.DO_BACKWARD, TrainingStage.AFTER_BATCH))
    with pytest.raises(ValueError):  # noqa: PT011 - the messages have tests of their own
        registry.register(wrong)
    for stage in TrainingStage:
        registry.dispatch(at(0), stage)
    assert list(registry) == [first]
    assert registry.owner(TrainingStage.DO_BACKWARD) is first
    assert registry.owner(TrainingStage.DO_OPTIMIZER_STEP) is None
    assert wrong.log == []
    assert [stage for _, _, stage in first.log] == ["DO_BACKWARD", "AFTER_BATCH"]


def test_a_hook_that_fails_to_say_where_it_runs(registry):
    """A hook whose `_runs_on_stage` raises is not registered."""

    class Fails(Hook):
        def _runs_on_stage(self, stage):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        registry.register(Fails(None))
    assert len(registry) == 0


# What is called, and around it.


def test_who_is_called_at_a_stage_can_be_asked(registry):
    """In the order of the calls: owners of a slot last at SETUP, first elsewhere."""
    plain = Everywhere(TrainingStage.SETUP, name="plain")
    owner = Everywhere(*SLOTS, TrainingStage.SETUP, TrainingStage.AFTER_BATCH, name="owner")
    last = Hook(name="last")
    for hook in (last, owner, plain):
        registry.register(hook)
    assert registry.hooks_at(TrainingStage.SETUP) == (plain, owner)
    assert registry.hooks_at(TrainingStage.AFTER_BATCH) == (owner, last)
    assert registry.hooks_at(TrainingStage.AFTER_EPOCH) == ()


def test_something_can_be_put_around_every_call_and_taken_away(registry):
    """Each call goes through it, at the steps of the hook's own frequency; a hook that joins meanwhile stays."""
    log = []
    every, third, late = (Hook(log=log, name=name, frequency=n) for name, n in [("a", 1), ("b", 2), ("c", 1)])
    registry.register(every)
    registry.register(third)

    def wrap(hook, call):
        return lambda ctx, stage: (log.append(f"before {hook.name}"), call(ctx, stage))

    undo = registry.wrap_calls(wrap)
    registry.register(late)
    for step in (1, 2, 2):
        registry.dispatch(at(step), TrainingStage.AFTER_BATCH)
    names = [entry if isinstance(entry, str) else entry[0] for entry in log]
    assert names == ["before a", "a", "c", "before a", "a", "before b", "b", "c", "before a", "a", "c"]
    assert registry.last_calls(third) == {"AFTER_BATCH": 2}
    undo()
    log.clear()
    registry.dispatch(at(4), TrainingStage.AFTER_BATCH)
    assert [entry[0] for entry in log] == ["a", "b", "c"]
    assert registry.last_calls(third) == {"AFTER_BATCH": 4}
