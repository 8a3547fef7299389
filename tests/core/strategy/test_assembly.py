"""From what a user gives as hooks to one orchestrator and a registry."""

from __future__ import annotations

import re

import pytest

from nvalchemi.errors import HookConflictError, HookRegistrationError, UnknownHookError
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator

S = TrainingStage


def keys(strategy):
    return [hook.state_key for hook in strategy.orchestrator.iter_hooks()]


class First(TrainingUpdateHook):
    priority = 10
    reads_grad = False


class Second(TrainingUpdateHook):
    reads_grad = False


class Third(TrainingUpdateHook):
    priority = 70
    reads_grad = False


def test_bare_update_hooks_are_wrapped(make_strategy, batches):
    """A strategy wraps bare update hooks by itself, in the order of their priorities."""
    strategy = make_strategy(Third(), First(), Second())
    assert isinstance(strategy.orchestrator, TrainingUpdateOrchestrator)
    assert keys(strategy) == ["first", "second", "third"]


def test_a_strategy_without_hooks_trains(make_strategy, batches):
    """No hooks at all is legal: there is an orchestrator without children, and the optimizers step."""
    strategy = make_strategy()
    strategy.run(batches)
    assert keys(strategy) == []
    assert strategy.step_count == 4


def test_bare_hooks_beside_one_orchestrator_are_merged_with_it(make_strategy):
    """Bare update hooks beside an orchestrator are merged with it; ties keep the orchestrator's first."""
    given = TrainingUpdateOrchestrator(Second())
    strategy = make_strategy(Second().labelled("bare"), First(), given, Third())
    assert keys(strategy) == ["first", "second", "bare", "third"]
    assert [hook.state_key for hook in given.iter_hooks()] == ["second"]


def test_one_orchestrator_alone_keeps_its_identity(make_strategy, plain, batches):
    """One orchestrator alone, plain hooks beside it or not, is the strategy's own."""
    given = TrainingUpdateOrchestrator(First(), Second())
    strategy = make_strategy(plain(lambda ctx, stage: None, S.AFTER_BATCH), given)
    assert strategy.orchestrator is given
    strategy.run(batches)
    assert given.last_outcome is not None


def test_two_orchestrators_are_refused(make_strategy):
    """Two orchestrators are a ValueError that says to compose them with `+`; composed they are taken."""
    one, two = TrainingUpdateOrchestrator(First()), TrainingUpdateOrchestrator(Second())
    with pytest.raises(
        ValueError, match=r"2 orchestrators were given, but a strategy has one; compose them with \+"
    ) as i:
        make_strategy(one, two)
    assert isinstance(i.value, HookConflictError)
    assert keys(make_strategy(one + two)) == ["first", "second"]


def test_labels_of_a_mapping_become_state_keys(make_strategy, veto, batches):
    """In a mapping the key is the label of its hook: its `state_key`, and its name in what happened."""
    strategy = make_strategy(hooks={"fast": veto(1), "slow": veto(2)})
    assert keys(strategy) == ["fast", "slow"]
    outcomes = [strategy.train_batch(batch).outcome for batch in batches[:3]]
    assert [[v.hook for v in outcome.vetoes] for outcome in outcomes] == [[], ["fast"], ["slow"]]


def test_a_refused_mapping_labels_nothing(make_strategy):
    """When the hooks of a mapping cannot be composed they are as they were, without its labels."""
    hook, orchestrators = First(), [TrainingUpdateOrchestrator(Second()), TrainingUpdateOrchestrator(Third())]
    with pytest.raises(HookConflictError):
        make_strategy(hooks={"mine": hook, "a": orchestrators[0], "b": orchestrators[1]})
    assert hook.label is None
    assert hook.state_key == "first"


def test_priorities_override_those_of_the_hooks(make_strategy):
    """`priorities=` orders update hooks anew, by state key, of an orchestrator that was given too."""
    changed = {"first": 90, "third": 5}
    assert keys(make_strategy(First(), Second(), Third(), priorities=changed)) == ["third", "second", "first"]
    given = TrainingUpdateOrchestrator(First(), Second(), Third())
    assert keys(make_strategy(given, priorities=changed)) == ["third", "second", "first"]
    assert [hook.state_key for hook in given.iter_hooks()] == ["first", "second", "third"]


def test_a_priority_for_an_unknown_key_is_refused(make_strategy):
    """A priority for a key that no hook has is refused, naming the closest."""
    with pytest.raises(ValueError, match=r"'frist'.*did you mean 'first'"):
        make_strategy(First(), priorities={"frist": 3})
    with pytest.raises(ValueError, match=r"'first' is '3'; it must be an int"):
        make_strategy(First(), priorities={"first": "3"})


def test_indistinguishable_twins_are_refused(make_strategy):
    """Two hooks of one state key are refused by name, with the remedy; with labels they are taken."""
    with pytest.raises(HookConflictError, match=r"First and First cannot be told apart.*'first'.*give them labels"):
        make_strategy(First(), First())
    assert keys(make_strategy(hooks={"a": First(), "b": First()})) == ["a", "b"]


@pytest.mark.parametrize("form", ["one", "list", "tuple", "generator", "mapping", "none"])
def test_hooks_are_given_in_any_form(make_strategy, form):
    """One hook, a list, a tuple, a generator, a mapping, or None."""
    hook = First()
    hooks = {
        "one": hook,
        "list": [hook],
        "tuple": (hook,),
        "generator": (h for h in [hook]),
        "mapping": {"first": hook},
        "none": None,
    }
    assert keys(make_strategy(hooks=hooks[form])) == ([] if form == "none" else ["first"])


def test_an_unknown_hook_name_gives_the_closest_match(make_strategy, site):
    """A name that no installed hook has is an error with the name and the closest one there is."""
    site.add_plugin("acme-hooks", ["spectral", "noise"])
    with pytest.raises(UnknownHookError, match=r"(?i)'spectrl'.*did you mean 'spectral'"):
        make_strategy("spectrl")


PLUGIN = """
from nvalchemi.hooks import HookOffer, hookimpl
from nvalchemi.training.hooks import TrainingUpdateHook

class Gate(TrainingUpdateHook):
    reads_grad = False
    def __init__(self, limit=1):
        self.limit = limit
    def before_optimizer_step(self, ctx, *, will_skip):
        if ctx.batch_count >= self.limit:
            raise ArithmeticError("over the limit")
        return True

@hookimpl
def nvalchemi_hooks():
    return [HookOffer("gate", Gate, default_kwargs={"limit": 2})]
"""


@pytest.fixture
def gate(site):
    """A distribution with an update hook that raises."""
    module = "gate_hooks.plugin"
    site.add("gate-hooks", "4.2", hooks={"gate": module}, modules={module: PLUGIN})


@pytest.mark.usefixtures("gate")
@pytest.mark.parametrize(
    ("hooks", "limit", "key"),
    [
        (["gate"], 2, "gate"),
        ([{"gate": {"limit": 3}}], 3, "gate"),
        ({"mine": "gate"}, 2, "mine"),
        ({"mine": {"gate": {"limit": 3}}}, 3, "mine"),
        ("auto", 2, "gate"),
    ],
)
def test_hooks_are_activated_by_name(make_strategy, hooks, limit, key):
    """A strategy activates what its configuration names, with arguments and labels, or all with ``"auto"``."""
    strategy = make_strategy(hooks=hooks)
    assert keys(strategy) == [key]
    assert next(strategy.orchestrator.iter_hooks()).limit == limit


@pytest.mark.usefixtures("gate")
def test_an_exception_of_an_update_hook_says_where_it_comes_from(make_strategy, batches):
    """An exception in an update hook carries a note with hook, distribution and version, stage and step."""
    strategy = make_strategy("gate")
    with pytest.raises(ArithmeticError, match="over the limit") as info:
        strategy.run(batches)
    assert info.value.__notes__ == ["In hook Gate (gate-hooks 4.2), stage DO_OPTIMIZER_STEP, step 2."]


def test_an_exception_of_a_plain_hook_says_where_it_comes_from(make_strategy, plain, batches):
    """An exception in a plain hook carries the note too; one of the user's model carries none."""

    def fail(ctx, stage):
        raise ArithmeticError("plain")

    with pytest.raises(ArithmeticError, match="plain") as info:
        make_strategy(plain(fail, S.AFTER_LOSS)).run(batches)
    assert info.value.__notes__ == ["In hook Plain (no installed distribution), stage AFTER_LOSS, step 0."]
    with pytest.raises(ArithmeticError, match="model") as info:
        make_strategy(training_fn=lambda model, batch: (_ for _ in ()).throw(ArithmeticError("model"))).run(batches)
    assert not hasattr(info.value, "__notes__")


class Bare:
    frequency = 1
    stage = None

    def __call__(self, ctx, stage):
        pass


def with_field(**fields):
    hook = Bare()
    hook.stage = S.AFTER_BATCH
    for name, value in fields.items():
        setattr(hook, name, value)
    return hook


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Bare, r"Bare runs at no stage.*set `stage`"),
        (lambda: with_field(frequency=0), r"Bare.frequency is 0; it must be an int of 1 or more"),
        (lambda: with_field(frequency=True), r"Bare.frequency is True; it must be an int of 1 or more"),
        (lambda: with_field(frequency=2.0), r"Bare.frequency is 2.0; it must be an int of 1 or more"),
        (
            lambda: with_field(stage="AFTER_BATCH"),
            r"Bare.stage is 'AFTER_BATCH', which is no TrainingStage; use one of",
        ),
        (lambda: print, r"no `?frequency"),
    ],
)
def test_a_plain_hook_that_does_not_fit_is_refused(make_strategy, make, message):
    """A plain hook without a stage, or with a wrong frequency or stage, is refused by name with the mend."""
    with pytest.raises(HookRegistrationError, match=message):
        make_strategy(make())


def test_the_same_plain_hook_twice_is_refused(make_strategy, plain):
    """The same instance twice is refused, by identity."""
    hook = plain(lambda ctx, stage: None, S.AFTER_BATCH)
    with pytest.raises(HookRegistrationError, match=re.escape("Plain is registered already")):
        make_strategy(hook, hook)


@pytest.mark.parametrize("wrong", [First, 3])
def test_something_that_is_no_hook_is_refused(make_strategy, wrong):
    """A class, or something that is no hook, is a TypeError that names it and its place."""
    with pytest.raises(TypeError, match=r"hooks\[0\] is"):
        make_strategy(wrong)


def test_a_strategy_can_be_asked_for_its_hooks(make_strategy, plain):
    """`strategy.hooks` holds plain hooks and update hooks as they were given."""
    mine, update = plain(lambda ctx, stage: None, S.AFTER_BATCH), First()
    assert set(map(id, make_strategy(mine, update).hooks)) >= {id(mine), id(update)}
