"""The kit bites: each check fails for the hooks that are faulty in its way, and for no others."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from nvalchemi.testing import FakeSite, HookConformance

FILE = Path(__file__).with_name("faulty_hooks.py")
PLUGIN = """
from nvalchemi.hooks import HookOffer, hookimpl
{more}
@hookimpl
def nvalchemi_hooks():
    import faulty_hooks
    yield HookOffer({name!r}, faulty_hooks.{made}, summary="for a test")
"""
COMPLETE = {"Summary": "A hook.", "License-Expression": "MIT", "Requires-Python": ">=3.11", "Description": "A card."}
RANGE = "nvalchemi-hooks>=0.1,<0.2"


def cases() -> dict[str, str]:
    """Test class -> the check that has to catch it; empty for a hook without a fault."""
    found = {}
    for node in ast.parse(FILE.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            values = [
                one.value for one in node.body if isinstance(one, ast.Assign) and one.targets[0].id == "caught_by"
            ]
            found[node.name] = ast.literal_eval(values[0]) if values else ""
    return found


CHECKS = {name for name in dir(HookConformance) if getattr(getattr(HookConformance, name), "is_check", False)}


@pytest.fixture(scope="module")
def run(run_file, tmp_path_factory):
    """All cases, run once, beside made-up distributions that are complete but for one thing each."""
    site = FakeSite(tmp_path_factory.mktemp("site"))
    site.refreshes = False

    def publish(name, *, made="Good", more="", headers=COMPLETE, requires=RANGE):
        module = f"plugin_of_{name}"
        source = PLUGIN.format(name=name, made=made, more=more)
        site.add(f"acme-{name}", hooks={name: module}, modules={module: source}, requires=[requires], headers=headers)

    publish("found")
    publish("another", made="PlainLogger")
    publish("unlicensed", headers={key: value for key, value in COMPLETE.items() if "License" not in key})
    publish("unbounded", requires="nvalchemi-hooks>=0.1")
    publish("eager", more="import torch")
    return run_file(tmp_path_factory.mktemp("faulty"), FILE, "-rs", path=(site.path,))


@pytest.mark.parametrize(("name", "caught_by"), cases().items(), ids=cases())
def test_a_fault_is_caught_by_its_check_alone(run, name, caught_by):
    """The check that is meant for a fault fails, every other check passes or does not apply."""
    if caught_by == "test_it_trains_on_a_gpu" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    assert run.of(name, "failed") == ({caught_by} if caught_by else set())


def test_every_check_has_a_fault_that_it_catches():
    """No check is there without a hook that shows that it bites."""
    assert set(cases().values()) - {""} == CHECKS
    assert len(CHECKS) > 20


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_a_check_says_in_one_sentence_what_must_hold(name):
    """Its docstring is one sentence, which stands in the failure beside what to do."""
    sentence = getattr(HookConformance, name).__doc__
    assert sentence.endswith(".")
    assert sentence.count(". ") == 0
    assert "\n" not in sentence


def test_a_failure_says_what_must_hold_and_what_to_do(run):
    """Both stand below the failure, and so they do where the hook's own error is what failed."""
    assert "What must hold: The state of a new hook is plain data, and another new hook takes it." in run.output
    assert "What to do: keep no lambda, lock, open file or generator in an attribute" in run.output


def test_the_number_of_checks_is_printed(run):
    """One line for each class: how many ran, and what became of them."""
    skipped, passed = len(run.of("TestGood", "skipped")), len(run.of("TestGood", "passed"))
    assert f"faulty_hooks.py::TestGood: {passed} checks run ({passed} passed, {skipped} skipped)" in run.output


def test_a_check_that_does_not_apply_says_why(run):
    """A plain hook takes no part in the update, and a hook without an entry point cannot be found."""
    assert "a plain hook takes no part in the weight update" in run.output
    assert "entry_point is None: the hook is not published" in run.output
