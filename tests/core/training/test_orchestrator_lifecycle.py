"""Entering and closing the children of an orchestrator."""

from __future__ import annotations

import pytest

from nvalchemi.training.hooks import PassThrough, TrainingUpdateHook, TrainingUpdateOrchestrator


class Opens(TrainingUpdateHook):
    """Can be entered; fails where it is told to."""

    def __init__(self, label, log, fails=()):
        self.labelled(label)
        self.log, self.fails = log, fails

    def note(self, what):
        self.log.append(f"{what} {self.label}")
        if what in self.fails:
            raise OSError(f"{what} {self.label}")

    def __enter__(self):
        self.note("enter")
        return self

    def __exit__(self, kind, error, traceback):
        self.error = error
        self.note("exit")


class OnlyCloses(TrainingUpdateHook):
    """Has `close`, and cannot be entered."""

    def __init__(self, label, log):
        self.labelled(label)
        self.log = log

    def close(self):
        self.log.append(f"close {self.label}")


def test_entered_in_order_and_closed_in_reverse():
    """Children that can are entered in order and closed in reverse; the others are left alone."""
    log = []
    with TrainingUpdateOrchestrator(Opens("a", log), PassThrough(), Opens("b", log)) as orchestrator:
        assert [hook.state_key for hook in orchestrator.iter_hooks()] == ["a", "pass_through", "b"]
        assert log == ["enter a", "enter b"]
    assert log == ["enter a", "enter b", "exit b", "exit a"]


def test_the_order_is_that_of_priorities():
    """The order of entering is the order of dispatch."""
    log = []
    first = Opens("first", log)
    first.priority = 10
    with TrainingUpdateOrchestrator(Opens("last", log), first):
        pass
    assert log == ["enter first", "enter last", "exit last", "exit first"]


def test_a_hook_that_has_only_close_is_closed():
    """A child with `close` alone is closed at the exit, in its place, and also by `close`."""
    log = []
    with TrainingUpdateOrchestrator(Opens("a", log), OnlyCloses("b", log), Opens("c", log)):
        pass
    assert log == ["enter a", "enter c", "exit c", "close b", "exit a"]
    log.clear()
    TrainingUpdateOrchestrator(OnlyCloses("a", log), OnlyCloses("b", log)).close()
    assert log == ["close b", "close a"]


def test_closing_twice_is_harmless():
    """Closing twice, by whatever way, closes every child once."""
    log = []
    orchestrator = TrainingUpdateOrchestrator(Opens("a", log), OnlyCloses("b", log))
    with orchestrator:
        orchestrator.close()
        orchestrator.close()
    orchestrator.close()
    assert log == ["enter a", "close b", "exit a"]


def test_a_second_run_enters_and_closes_again():
    """After it was closed an orchestrator can be entered again."""
    log = []
    orchestrator = TrainingUpdateOrchestrator(Opens("a", log), OnlyCloses("b", log))
    for _ in range(2):
        with orchestrator:
            pass
    assert log == ["enter a", "close b", "exit a"] * 2


def test_all_are_closed_even_if_one_raises():
    """All are closed even if one raises, and its error is raised in the end."""
    log = []
    with pytest.raises(OSError, match="exit b"), TrainingUpdateOrchestrator(Opens("a", log), Opens("b", log, ["exit"])):
        pass
    assert log[2:] == ["exit b", "exit a"]


def test_the_first_failure_is_kept():
    """Of several clean-up errors the first is raised, and the others are attached to it."""
    log = []
    hooks = [Opens(label, log, ["exit"]) for label in "abc"]
    with pytest.raises(OSError, match="exit c") as caught, TrainingUpdateOrchestrator(*hooks):
        pass
    assert len(caught.value.__notes__) == 2
    assert "exit b" in caught.value.__notes__[0]
    assert "exit a" in caught.value.__notes__[1]


@pytest.mark.parametrize("error", [ZeroDivisionError("training"), KeyboardInterrupt()])
def test_the_error_of_the_training_stays_the_one_that_is_raised(error):
    """The error of the training stays the one that is raised; clean-up errors are attached to it."""
    log = []
    hooks = Opens("a", log), Opens("b", log, ["exit"])
    with pytest.raises(type(error)) as caught, TrainingUpdateOrchestrator(*hooks):
        raise error
    assert caught.value is error
    assert log[2:] == ["exit b", "exit a"]
    assert any("exit b" in note for note in error.__notes__)


def test_children_learn_of_the_error():
    """A child's ``__exit__`` is given the error of the training."""
    hook = Opens("a", [])
    error = ZeroDivisionError("training")
    with pytest.raises(ZeroDivisionError), TrainingUpdateOrchestrator(hook):
        raise error
    assert hook.error is error


def test_a_child_cannot_swallow_the_error():
    """A child whose ``__exit__`` returns True swallows no error of the training."""

    class Swallows(Opens):
        def __exit__(self, *_):
            return True

    with pytest.raises(ZeroDivisionError), TrainingUpdateOrchestrator(Swallows("a", [])):
        raise ZeroDivisionError


def test_a_failing_enter_closes_those_already_entered():
    """A failing enter closes those already entered, enters no other, and its error is raised."""
    log = []
    hooks = [Opens("a", log), Opens("b", log), Opens("c", log, ["enter"]), Opens("d", log)]
    orchestrator = TrainingUpdateOrchestrator(*hooks)
    with pytest.raises(OSError, match="enter c"):
        orchestrator.__enter__()
    assert log == ["enter a", "enter b", "enter c", "exit b", "exit a"]


def test_a_failing_enter_stays_the_error_that_is_raised():
    """When closing fails too after a failing enter, the error of the enter is raised and the other attached."""
    log = []
    with pytest.raises(OSError, match="enter b") as caught:
        TrainingUpdateOrchestrator(Opens("a", log, ["exit"]), Opens("b", log, ["enter"])).__enter__()
    assert any("exit a" in note for note in caught.value.__notes__)
