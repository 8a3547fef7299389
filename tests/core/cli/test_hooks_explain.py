"""``nvalchemi hooks explain``: what a configuration comes to."""

from __future__ import annotations

import json

import pytest

from nvalchemi.cli import main

PLUGIN = """
from nvalchemi.hooks import HookOffer, hookimpl
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook

class Late(TrainingUpdateHook):
    def after_optimizer_step(self, ctx, *, skipped): pass

class Early(TrainingUpdateHook):
    priority = 30
    exclusive_family = "clipping"
    def before_optimizer_step(self, ctx, *, will_skip): return True
    def after_optimizer_step(self, ctx, *, skipped): pass

class Setup:
    frequency, stage = 1, TrainingStage.SETUP
    def __call__(self, ctx, stage): pass

class First(TrainingUpdateHook):
    def setup(self, ctx): pass

@hookimpl
def nvalchemi_hooks():
    offers = {"late": Late, "early": Early, "wrap": Setup, "first": First}
    return [HookOffer(name, make, default_kwargs={} if name == "late" else None) for name, make in offers.items()]
"""


@pytest.fixture
def acme(site):
    """A distribution with three update hooks and a plain one."""
    names = ["late", "early", "wrap", "first"]
    site.add("acme-hooks", "1.2", hooks=dict.fromkeys(names, "acme.plugin"), modules={"acme.plugin": PLUGIN})
    return site


def explain(capsys, *arguments):
    assert main(["hooks", "explain", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_order_stands_stage_by_stage(acme, capsys):
    """Update hooks by priority, plain hooks first at SETUP: as the strategy would call them."""
    shown = explain(capsys, "late,early,first,wrap")
    assert shown["stages"] == {
        "SETUP": ["wrap", "first"],
        "DO_OPTIMIZER_STEP": ["early"],
        "AFTER_OPTIMIZER_STEP": ["early", "late"],
    }
    early, late, _ = shown["hooks"]
    assert (early["key"], early["priority"], early["may_veto"], early["exclusive_family"]) == (
        "early", 30, True, "clipping",
    )  # fmt: skip
    assert early["reason"] == "the threshold is meant for true and finite gradients"
    assert (late["source"], late["may_veto"], late["exclusive_family"]) == ("acme-hooks 1.2", False, None)
    assert shown["plain_hooks"] == [{"key": "wrap", "hook": "Setup", "source": "acme-hooks 1.2"}]


def test_a_person_reads_who_may_veto_what_excludes_and_whose_it_is(acme, capsys):
    """The text has a paragraph a stage and one a hook, without colours in a pipe."""
    assert main(["hooks", "explain", "late,early,wrap"]) == 0
    assert capsys.readouterr().out == (
        "SETUP\n"
        "       wrap: a plain hook\n"
        "DO_OPTIMIZER_STEP\n"
        "   30  early, may veto, reads gradients\n"
        "AFTER_OPTIMIZER_STEP\n"
        "   30  early\n"
        "   50  late\n"
        "\nearly is Early of acme-hooks 1.2\n"
        "  priority 30: the threshold is meant for true and finite gradients\n"
        "  excludes any other hook of the family 'clipping'\n"
        "\nlate is Late of acme-hooks 1.2\n"
        "  priority 50: the default: after everything that shapes the step\n"
        "\nwrap is Setup of acme-hooks 1.2\n"
    )


FILES = {
    "a.json": '["late", {"early": {}}]',
    "b.json": '{"hooks": ["late", "early"], "priorities": {"early": 60}}',
    "c.toml": 'hooks = ["late", {early = {}}]\npriorities = {early = 60}\n',
    "d.toml": "[hooks.slow]\nlate = {}\n[hooks.fast]\nearly = {}\n[priorities]\nfast = 60\n",
}


@pytest.mark.parametrize(
    ("config", "order"),
    [
        ("auto", ["late"]),
        (" late , early,", ["early", "late"]),
        ('["late", "early"]', ["early", "late"]),
        ('{"x": "late", "y": {"early": {}}}', ["y", "x"]),
        ("a.json", ["early", "late"]),
        ("b.json", ["late", "early"]),
        ("c.toml", ["late", "early"]),
        ("d.toml", ["slow", "fast"]),
        ("", []),
    ],
)
def test_every_form_of_a_configuration_is_read(acme, tmp_path, monkeypatch, capsys, config, order):
    """Names, JSON and files, with labels and priorities."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    assert [hook["key"] for hook in explain(capsys, config)["hooks"]] == order


def test_a_priority_on_the_command_line_counts_last(acme, capsys):
    """``--priority key=n`` moves a hook, and the reason says that the user did."""
    shown = explain(capsys, "late,early", "--priority", "early=60")
    assert [(hook["key"], hook["reason"]) for hook in shown["hooks"]][1] == ("early", "the user's priority")


def test_nothing_configured_is_explained_too(acme, capsys):
    """What is left is said."""
    assert main(["hooks", "explain", "[]"]) == 0
    assert capsys.readouterr().out == "No hooks: gradients are zeroed, backward runs, every optimizer steps.\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["layte"], "no installed hook is called 'layte'; did you mean 'late'?"),
        (["gone.toml"], "there is no file gone.toml"),
        (["bad.toml"], "bad.toml is no TOML"),
        (["bad.json"], "bad.json is no JSON"),
        (["[1"], "the configuration is no JSON"),
        (["[1]"], "hooks[0] is 1, a int"),
        (["late,late"], "cannot be told apart"),
        (['[{"late": {"decay": 1}}]'], "While building the hook 'late' of acme-hooks 1.2"),
        (["late", "--priority", "late=x"], "--priority late=x"),
        (["late", "--priority", "lat=1"], "did you mean 'late'?"),
    ],
)
def test_what_cannot_be_explained_is_a_sentence_and_exit_code_one(acme, tmp_path, monkeypatch, capsys, arguments, text):
    """Never a traceback: what was wrong, with the closest match where there is one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.toml").write_text("[")
    (tmp_path / "bad.json").write_text("[")
    assert main(["hooks", "explain", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("nvalchemi: error: ")
    assert text in err


def test_a_broken_plugin_is_told_on_standard_error_and_the_rest_explained(acme, capsys):
    """With ``auto`` the output stays readable for a program."""
    acme.add("bad-hooks", hooks={"bad": "bad"}, modules={"bad": "1 / 0"})
    assert main(["hooks", "explain", "auto", "--json"]) == 0
    out, err = capsys.readouterr()
    assert [hook["key"] for hook in json.loads(out)["hooks"]] == ["late"]
    assert err.startswith("nvalchemi: warning: the hook 'bad' of bad-hooks 1.0")
