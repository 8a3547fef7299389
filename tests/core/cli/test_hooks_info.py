"""``nvalchemi hooks info``: everything about one hook, also about one that does not work."""

from __future__ import annotations

import json
import sys

import pytest

from nvalchemi.cli import main

PLUGIN = """
from nvalchemi.hooks import HookOffer, hookimpl
from nvalchemi.training.hooks import TrainingUpdateHook

class Noise(TrainingUpdateHook):
    priority = 40
    defers_veto = True
    exclusive_family = "noise"
    def __init__(self, std=0.1): self.std = std
    def before_optimizer_step(self, ctx, *, will_skip): return True
    def state_dict(self): return {}
    def load_state_dict(self, state): pass

class Log:
    frequency, stage = 10, None
    def _runs_on_stage(self, stage): return stage.name in ("AFTER_BATCH", "AFTER_EPOCH")
    def __call__(self, ctx, stage): pass
    def close(self): pass

def needy(*, path): return Log()

@hookimpl
def nvalchemi_hooks():
    return [
        HookOffer("noise", Noise, default_kwargs={"std": 0.2}, summary="adds noise"),
        HookOffer("log", Log, summary="writes a log"),
        HookOffer("needy", needy),
    ]
"""
HEADERS = {
    "Summary": "Noise for gradients.",
    "License-Expression": "MIT",
    "Requires-Python": ">=3.11",
    "Home-page": "https://example.org",
    "Project-URL": "Source, https://example.org/source",
}


@pytest.fixture
def acme(site):
    """A distribution with an update hook, a plain hook, and one that needs arguments."""
    module = "acme_hooks.plugin"
    site.add(
        "acme-hooks", "1.2", hooks=dict.fromkeys(["noise", "log", "needy"], module), modules={module: PLUGIN},
        requires=["nvalchemi-hooks>=0.1,<9"], headers=HEADERS,
    )  # fmt: skip
    site.add("nvalchemi-hooks", "0.5")
    return site


def info(capsys, *arguments, code=0):
    assert main(["hooks", "info", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_an_update_hook_is_told_whole(acme, capsys):
    """What the metadata, the offer and the hook itself say stands in one object."""
    shown = info(capsys, "noise")
    card = shown["about"].pop("card")
    assert card.strip() == "Name: not a header any more"
    assert shown == {
        "name": "noise",
        "qualified_name": "acme-hooks:noise",
        "state": "available",
        "reason": "",
        "distribution": "acme-hooks",
        "version": "1.2",
        "target": "acme_hooks.plugin",
        "api_range": "<9,>=0.1",
        "core_version": "0.5",
        "hook_api": 1,
        "about": {
            "summary": "Noise for gradients.",
            "license": "MIT",
            "requires_python": ">=3.11",
            "homepage": "https://example.org",
            "links": {"Source": "https://example.org/source"},
        },
        "summary": "adds noise",
        "default_kwargs": {"std": 0.2},
        "kind": "update hook",
        "cls": "acme_hooks.plugin:Noise",
        "priority": 40,
        "priority_reason": "judges the step that would really be taken",
        "frequency": None,
        "stages": ["DO_OPTIMIZER_STEP"],
        "powers": [
            "may veto",
            "may leave its veto on the device",
            "reads gradients",
            "excludes others of the family 'noise'",
            "keeps state for a checkpoint",
        ],
    }


def test_a_plain_hook_has_frequency_and_stages(acme, capsys):
    """Its stages are those that it claims; it has no priority."""
    shown = info(capsys, "log")
    assert (shown["kind"], shown["frequency"], shown["priority"]) == ("plain hook", 10, None)
    assert shown["stages"] == ["AFTER_BATCH", "AFTER_EPOCH"]
    assert shown["powers"] == ["is closed after training"]


def test_a_hook_that_needs_arguments_is_made_with_those_that_are_given(acme, capsys):
    """Without them the reason stands in ``not_made``, and all else is there; with them its stages are known."""
    shown = info(capsys, "needy")
    assert "missing 1 required keyword-only argument: 'path'" in shown["not_made"]
    assert "stages" not in shown
    assert info(capsys, "needy", "--arguments", '{"path": "x"}')["stages"] == ["AFTER_BATCH", "AFTER_EPOCH"]


@pytest.mark.parametrize("arguments", ["{", "[1]"])
def test_arguments_that_are_no_json_object_are_an_error(acme, capsys, arguments):
    """The sentence has what was given."""
    assert main(["hooks", "info", "needy", "--arguments", arguments]) == 1
    assert "--arguments is" in capsys.readouterr().err


def test_of_a_broken_hook_everything_is_said_that_the_metadata_knows(site, capsys):
    """State, cause, version, target, range and summary are there, and the exit code tells that it cannot be used."""
    site.add(
        "bad-hooks", "3.1", hooks={"bad": "bad_hooks.plugin"}, modules={"bad_hooks.plugin": "1 / 0"}, headers=HEADERS,
        requires=["nvalchemi-hooks>=0.1"],
    )  # fmt: skip
    shown = info(capsys, "bad", code=1)
    assert shown["state"] == "broken"
    assert "ZeroDivisionError" in shown["reason"]
    known = (shown["version"], shown["target"], shown["api_range"], shown["about"]["summary"])
    assert known == ("3.1", "bad_hooks.plugin", ">=0.1", "Noise for gradients.")


def test_what_is_switched_off_or_made_for_another_core_is_shown_and_not_loaded(acme, monkeypatch, capsys):
    """The reason is there, and the module is not imported."""
    acme.add_plugin("old-hooks", ["old"], requires=["nvalchemi-hooks<0.3"])
    monkeypatch.setenv("NVALCHEMI_HOOKS_DISABLE", "noise")
    assert info(capsys, "noise", code=1)["reason"] == "switched off by NVALCHEMI_HOOKS_DISABLE"
    old = info(capsys, "old", code=1)
    assert (old["state"], old["reason"]) == ("incompatible", "made for nvalchemi-hooks <0.3, and 0.5 is installed")
    assert not {"acme_hooks.plugin", "old_hooks.plugin"} & set(sys.modules)


def test_it_loads_that_one_plugin_alone(acme, capsys):
    """Another distribution's module stays out."""
    other = acme.add_plugin("other-hooks", ["other"])
    info(capsys, "acme-hooks:noise")
    assert "acme_hooks.plugin" in sys.modules
    assert other not in sys.modules


def test_a_name_that_nobody_has_or_that_several_have_is_an_error(acme, capsys):
    """The closest name, or both ways to choose, stand on standard error."""
    acme.add_plugin("zeta-hooks", ["noise"])
    assert main(["hooks", "info", "needi"]) == 1
    assert "did you mean 'needy'" in capsys.readouterr().err
    assert main(["hooks", "info", "noise"]) == 1
    assert "write 'acme-hooks:noise' or 'zeta-hooks:noise'" in capsys.readouterr().err


def test_a_person_reads_lines_and_the_card(acme, capsys):
    """The same as text, without colours where there is no terminal; ``--card`` adds the description."""
    assert main(["hooks", "info", "noise", "--card"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("noise (available): adds noise\n")
    for line in (
        "from          acme-hooks 1.2",
        "core          <9,>=0.1 (0.5 is installed, hook API 1)",
        "source        https://example.org/source",
        "hooks=\"auto\"  yes, with {'std': 0.2}",
        "priority      40: judges the step that would really be taken",
        "acts at       DO_OPTIMIZER_STEP",
    ):
        assert f"  {line}\n" in text
    assert text.rstrip().endswith("Name: not a header any more")
    assert "\x1b" not in text
