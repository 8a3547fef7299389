"""``nvalchemi hooks check``: what an author is told before anything is trained."""

from __future__ import annotations

import json
import sys

import pytest

from nvalchemi.cli import main

PLUGIN = """
from nvalchemi.hooks import HookOffer, hookimpl
class Hook:
    frequency, stage = 1, None
    def __init__(self, std=1.0): self.std = std + 0
    def _runs_on_stage(self, stage): return stage.name == "SETUP"
    def __call__(self, ctx, stage): pass
@hookimpl
def nvalchemi_hooks():
    return [HookOffer("noise", factory={factory}, default_kwargs={defaults}, summary={summary!r})]
"""
HEADERS = {"Summary": "Noise.", "License-Expression": "MIT", "Requires-Python": ">=3.11", "Description": "A card."}


@pytest.fixture
def install(site):
    """Install the distribution of a hook, good but for what is said."""

    def install(*, source=None, requires="nvalchemi-hooks>=0.1,<9", headers=HEADERS, before="", **offer):
        source = source or PLUGIN.format(**{"factory": "Hook", "defaults": "{}", "summary": "adds noise", **offer})
        site.add(
            "acme-hooks", hooks={"noise": "acme.plugin"}, modules={"acme.plugin": before + source},
            requires=[requires], headers=headers,
        )  # fmt: skip

    site.add("nvalchemi-hooks", "0.5")
    return install


def check(capsys, *arguments):
    """Return the exit code and the answers by name."""
    code = main(["hooks", "check", *arguments, "--json"])
    return code, {answer["check"]: answer for answer in json.loads(capsys.readouterr().out)}


def failing(capsys, *arguments):
    """Return what does not hold; each has a sentence, what was found, and a remedy."""
    code, answers = check(capsys, *arguments)
    fails = [answer for answer in answers.values() if answer["holds"] is False]
    assert code == (1 if fails else 0)
    for answer in fails:
        assert answer["sentence"].endswith(".")
        assert answer["fault"]
        assert answer["remedy"]
    return {answer["check"]: answer["fault"] for answer in fails}


@pytest.mark.parametrize("target", ["noise", "acme-hooks:noise"])
def test_a_good_hook_holds_everywhere(install, capsys, target):
    """Six questions, six times yes, exit code 0."""
    install()
    code, answers = check(capsys, target)
    assert code == 0
    assert {name: answer["holds"] for name, answer in answers.items()} == dict.fromkeys(
        ["range", "metadata", "offer", "light", "made", "hook"], True
    )


@pytest.mark.parametrize(
    ("fault", "check_name", "text"),
    [
        ({"requires": "nvalchemi-hooks>=0.1"}, "range", "it asks for >=0.1"),
        ({"requires": "torch"}, "range", "it asks for any version"),
        ({"requires": "nvalchemi-hooks>=0.1,<0.2"}, "range", "made for nvalchemi-hooks <0.2,>=0.1, and 0.5"),
        ({"headers": {"Summary": "Noise."}}, "metadata", "it says nothing of License, Requires-Python"),
        ({"before": "import torch\n"}, "light", "importing acme.plugin imports torch"),
        ({"source": "def nvalchemi_hooks(): return []"}, "offer", "mark it with @hookimpl"),
        ({"source": "1 / 0"}, "offer", "ZeroDivisionError"),
        ({"source": PLUGIN.replace('"noise"', '"nose"').format(factory="Hook", defaults="{}", summary="x")}, "offer",
         "no offer is called 'noise'"),
        ({"summary": ""}, "offer", "the offer has no summary"),
        ({"defaults": "{'std': None}"}, "made", "TypeError: unsupported operand"),
        ({"factory": "lambda: len"}, "hook", "builtin_function_or_method is no hook"),
    ],
)  # fmt: skip
def test_each_fault_is_found(install, capsys, fault, check_name, text):
    """One thing is wrong: the question that is about it fails, and says what was found."""
    install(**fault)
    fails = failing(capsys, "noise")
    assert text in fails.pop(check_name)
    assert not fails.keys() - {"offer"}  # a plugin for another core is not loaded either


def test_what_cannot_be_asked_is_neither_good_nor_bad(install, capsys):
    """Of a plugin that does not load it is not known whether its hook is one."""
    install(source="1 / 0")
    _, answers = check(capsys, "noise")
    assert [name for name, answer in answers.items() if answer["holds"] is None] == ["light", "made", "hook"]


def test_a_hook_that_needs_arguments_is_no_fault_until_they_are_given(install, capsys):
    """An offer without defaults may need some; with ``--arguments`` it has to be made."""
    install(defaults="None", factory="lambda *, path: Hook()")
    code, answers = check(capsys, "noise")
    assert (code, answers["made"]["holds"], answers["made"]["remedy"]) == (0, None, "give --arguments")
    assert failing(capsys, "noise", "--arguments", '{"path": "x"}') == {}
    assert "made" in failing(capsys, "noise", "--arguments", '{"way": "x"}')


OWN = """
from nvalchemi.training.hooks import TrainingUpdateHook
class Good(TrainingUpdateHook): pass
class Never:
    frequency, stage = 1, None
    def __call__(self, ctx, stage): pass
value = 3
"""


@pytest.mark.parametrize(
    ("name", "check_name", "text"),
    [
        ("Good", None, ""),
        ("Never", "hook", "Never runs at no stage"),
        ("value", "class", "own_hooks:value is 3"),
        ("Gone", "class", "has no attribute 'Gone'"),
    ],
)
def test_a_class_is_checked_before_it_is_published(site, monkeypatch, tmp_path, capsys, name, check_name, text):
    """``module:Class``, from the working directory too, needs no distribution."""
    (tmp_path / "own_hooks.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_hooks", raising=False)
    fails = failing(capsys, f"own_hooks:{name}")
    assert list(fails) == ([check_name] if check_name else [])
    assert text in fails.get(check_name, "")


@pytest.mark.parametrize("target", ["noize", "acme-hooks:noize"])
def test_a_name_that_nobody_has_is_an_error_with_the_closest(install, capsys, target):
    """Nothing is checked."""
    install()
    assert main(["hooks", "check", target]) == 1
    assert "did you mean" in capsys.readouterr().err


def test_a_person_is_told_what_to_do_and_that_this_is_not_the_kit(install, capsys):
    """A line an answer, the remedy below what fails, and where training is checked."""
    install(requires="nvalchemi-hooks>=0.1")
    assert main(["hooks", "check", "noise"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("fails  range     The distribution asks for a range")
    assert 'To do: write dependencies = ["nvalchemi-hooks>=0.1,<0.2"].' in text
    assert "holds  metadata" in text
    assert "5 of 6 hold." in text
    assert "nvalchemi.testing.HookConformance" in text
