"""Open in order, close in reverse, lose nothing on the way."""

from __future__ import annotations

import pytest

from nvalchemi.hooks import HookRegistry
from nvalchemi.hooks.lifecycle import HookLifecycle, close_all
from nvalchemi.training import TrainingStage


class Opens:
    """A hook that can be entered; fails where it is told to."""

    frequency = 1
    stage = TrainingStage.AFTER_BATCH

    def __init__(self, name, log, fails=()):
        self.name, self.log, self.fails = name, log, fails

    def __call__(self, ctx, stage):
        """Do nothing."""

    def note(self, what):
        self.log.append(f"{what} {self.name}")
        if what in self.fails:
            raise OSError(f"{what} {self.name}")

    def __enter__(self):
        self.note("enter")

    def __exit__(self, *_):
        self.note("exit")

    def close(self):
        self.note("close")


def closers(log, *names, fails=()):
    def close(name):
        log.append(name)
        if name in fails:
            raise OSError(name)

    return [(f"file {name}", lambda name=name: close(name)) for name in names]


def test_every_closer_is_called():
    """Every closer is called, in the order given, also after one of them has raised."""
    log = []
    close_all(closers(log, "a", "b"))
    assert log == ["a", "b"]
    with pytest.raises(OSError, match="c"):
        close_all(closers(log, "c", "d", fails="c"))
    assert log == ["a", "b", "c", "d"]


def test_the_first_failure_is_raised_with_the_others_as_notes():
    """The first failure is raised; the later ones are notes on it that say what was being closed."""
    with pytest.raises(OSError, match="a") as caught:
        close_all(closers([], "a", "b", "c", fails="abc"))
    assert [note.split(" failed")[0] for note in caught.value.__notes__] == ["Closing file b", "Closing file c"]


def test_an_error_under_way_stays():
    """With an error under way nothing is raised; failures become notes on it."""
    error = ZeroDivisionError()
    close_all(closers([], "a", "b", fails="ab"), error)
    assert len(error.__notes__) == 2


@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit])
def test_an_interruption_while_closing_loses_nothing(failure):
    """An interruption while one is closed still lets the others close, and arrives."""
    log = []

    def interrupted():
        raise failure

    with pytest.raises(failure):
        close_all([("a file", interrupted), *closers(log, "b")])
    assert log == ["b"]


def test_a_hook_that_was_entered_is_exited_and_not_closed_too():
    """A hook that has both is exited if it was entered, and closed if it was not: once either way."""
    log = []
    hooks = [Opens("a", log)]
    lifecycle = HookLifecycle(lambda: hooks)
    lifecycle.enter()
    lifecycle.close()
    lifecycle.close()
    assert log == ["enter a", "exit a"]
    log.clear()
    HookLifecycle(lambda: hooks).close()
    assert log == ["close a"]


def test_a_hook_that_failed_to_enter_is_not_exited():
    """A hook whose entering failed is not exited; those entered before it are."""
    log = []
    hooks = [Opens("a", log), Opens("b", log, ["enter"])]
    with pytest.raises(OSError, match="enter b"):
        HookLifecycle(lambda: hooks).enter()
    assert "exit b" not in log
    assert "exit a" in log


def test_a_hook_that_joins_later_is_closed_too():
    """The group may grow: a hook that joined after the entering, or after a first closing, is closed."""
    log = []
    hooks = [Opens("a", log)]
    lifecycle = HookLifecycle(lambda: hooks)
    lifecycle.enter()
    hooks.append(Opens("b", log))
    lifecycle.close()
    assert log == ["enter a", "close b", "exit a"]
    hooks.append(Opens("c", log))
    lifecycle.close()
    assert log[3:] == ["close c"]


def test_a_registry_is_entered_and_closed_as_one():
    """A registry enters its hooks in order and closes them in reverse; the error of the training stays."""
    log = []
    registry = HookRegistry(TrainingStage)
    for hook in (Opens("a", log), Opens("b", log, ["exit"])):
        registry.register(hook)
    error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError) as caught, registry:
        raise error
    assert caught.value is error
    assert log == ["enter a", "enter b", "exit b", "exit a"]
    assert "exit b" in error.__notes__[0]
    registry.close()
    assert len(log) == 4
