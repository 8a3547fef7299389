"""What the kit makes of the test class of an author: declared failures, nothing checked, and classes it refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nvalchemi.testing import HookConformance, LossFactorHook
from nvalchemi.training.hooks import PassThrough

HEAD = "from nvalchemi.testing import HookConformance\nfrom nvalchemi.training.hooks import PassThrough\n"
CASE = """
class TestIt(HookConformance):
    factory = PassThrough
    reads_grad = False
"""


def test_a_declared_failure_is_strict(run_tests):
    """A check that is expected to fail is no failure where it fails, and is one where it passes."""
    failing = "    vetoes = True\n    expected_failures = {'test_its_veto_holds_for_everything': 'it never vetoes'}\n"
    passing = failing.replace("}", ", 'test_it_pickles': 'it does'}")
    run = run_tests(HEAD + CASE + failing + CASE.replace("TestIt", "TestThat") + passing, "-k", "veto or pickles")
    assert run.code == 1
    assert run.of("TestIt", "failed") == set()
    assert run.of("TestThat", "failed") == {"test_it_pickles"}
    assert "1 expected to fail" in run.output


def test_a_run_that_checks_nothing_fails(run_tests):
    """Where every check is skipped, the exit code says so, and the class is named."""
    run = run_tests(HEAD + CASE, "-k", "entry_point or keeps_its_promises or closes")
    assert set(run.outcomes["TestIt"].values()) == {"skipped"}
    assert run.code == 1
    assert "test_hook.py::TestIt: NOTHING WAS CHECKED" in run.output


def test_a_class_is_collected_whatever_its_name(run_tests):
    """A class that pytest would pass over because of its name is checked all the same."""
    run = run_tests(HEAD + CASE.replace("TestIt", "ChecksOfMine"), "-k", "pickles")
    assert run.of("ChecksOfMine", "passed") == {"test_it_pickles"}


def test_a_class_without_a_factory_says_what_to_set(run_tests):
    """The message names the class and the two ways to say how the hook is made."""
    run = run_tests(HEAD + "class TestIt(HookConformance):\n    pass\n", "-k", "pickles")
    assert run.code == 1
    assert "TestIt does not say how its hook is made; set `factory = MyHook`" in run.output


def test_an_expected_failure_has_to_be_a_check():
    """A name that no check has is refused when the class is made, and the closest is named."""
    with pytest.raises(TypeError, match="'test_it_pickle', which is no check; did you mean 'test_it_pickles'"):

        class TestIt(HookConformance):
            expected_failures = {"test_it_pickle": "of a typing mistake"}


def test_a_function_can_be_the_factory():
    """A function in the class body, a lambda for example, is called with the arguments alone."""

    class Checks(HookConformance):
        __test__ = False
        arguments = {"factor": 2.0}
        factory = lambda factor: LossFactorHook(factor * 2)  # noqa: E731

    assert Checks().make_hook().factor == 4.0


def test_a_method_can_make_the_hook():
    """`make_hook` may be overridden instead."""

    class Checks(HookConformance):
        __test__ = False

        def make_hook(self):
            return PassThrough()

    assert isinstance(Checks().make_hook(), PassThrough)


def test_without_pytest_the_kit_says_what_to_install():
    """Doubles work without pytest; asking for the kit or a fixture is an ImportError with the remedy."""
    code = """
import sys
sys.modules["pytest"] = None
import nvalchemi.testing
nvalchemi.testing.tiny_strategy(nvalchemi.testing.VetoingHook(1)).run(nvalchemi.testing.tiny_batches())
for name in ("HookConformance", "fake_site"):
    try:
        getattr(nvalchemi.testing, name)
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    message = (
        "The conformance kit and the fixtures of nvalchemi.testing run in pytest, which is not installed: "
        "pip install 'nvalchemi-hooks[testing]'"
    )
    assert done.stdout.splitlines() == [message] * 2
