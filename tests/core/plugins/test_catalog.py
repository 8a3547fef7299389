"""The listing: what can be said of installed hooks without importing any."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.errors import PluginLoadError, PluginWarning
from nvalchemi.hooks import HookState, activate_hooks, list_hooks, refresh_hooks
from nvalchemi.hooks.plugins.compatibility import compatibility
from nvalchemi.hooks.plugins.suggest import did_you_mean

BROKEN = "raise RuntimeError('no such driver')"


def states():
    return {hook.qualified_name: hook.state for hook in list_hooks()}


def test_a_listing_has_everything_from_the_metadata(site):
    """Name, target, distribution, version, range and state are listed, and the plugin's module stays unimported."""
    site.add_plugin("acme-hooks", ["noise"], "1.2", requires=["torch", "nvalchemi-hooks >=0.1, <99"])
    [hook] = list_hooks()
    assert (hook.name, hook.target, hook.distribution, hook.version) == (
        "noise",
        "acme_hooks.plugin",
        "acme-hooks",
        "1.2",
    )
    assert (hook.api_range, hook.state, hook.reason) == ("<99,>=0.1", HookState.AVAILABLE, "")
    assert "acme_hooks" not in sys.modules
    assert "acme_hooks.plugin" not in sys.modules


def test_listing_imports_neither_torch_nor_pydantic_nor_a_plugin(site):
    """A process that lists hooks has none of them among its modules."""
    site.add_plugin("acme-hooks", ["noise"])
    code = (
        "import sys; from nvalchemi.hooks import list_hooks\n"
        "assert 'noise' in [hook.name for hook in list_hooks()]\n"
        "print([m for m in ('torch', 'pydantic', 'pluggy', 'acme_hooks') if m in sys.modules])"
    )
    done = site.run("-c", code)
    assert done.stdout.strip() == "[]", done.stderr


def test_disable_switches_off_by_name_by_distribution_or_all(site, monkeypatch):
    """``NVALCHEMI_HOOKS_DISABLE`` takes a name, ``distribution:name`` in any spelling, a list, or a star."""
    site.add_plugin("acme-hooks", ["noise", "centre"])
    cases = {
        "noise": {"noise"},
        "Acme_Hooks:centre": {"centre"},
        " noise , centre ,": {"noise", "centre"},
        "*": {"noise", "centre"},
        "": set(),
    }
    for value, off in cases.items():
        monkeypatch.setenv("NVALCHEMI_HOOKS_DISABLE", value)
        assert {hook.name for hook in list_hooks() if hook.state is HookState.DISABLED} == off
    monkeypatch.setenv("NVALCHEMI_HOOKS_DISABLE", "noise")
    assert [hook.reason for hook in list_hooks() if hook.name == "noise"] == ["switched off by NVALCHEMI_HOOKS_DISABLE"]


def test_allow_leaves_only_what_it_names(site, monkeypatch):
    """With ``NVALCHEMI_HOOKS_ALLOW`` every other hook is not allowed, and the reason names the variable."""
    site.add_plugin("acme-hooks", ["noise", "centre"])
    monkeypatch.setenv("NVALCHEMI_HOOKS_ALLOW", "noise")
    assert states() == {"acme-hooks:noise": "available", "acme-hooks:centre": "not allowed"}
    assert "NVALCHEMI_HOOKS_ALLOW" in next(hook.reason for hook in list_hooks() if hook.name == "centre")


@pytest.mark.parametrize("variable", ["NVALCHEMI_HOOKS_DISABLE", "NVALCHEMI_HOOKS_ALLOW"])
def test_an_unknown_name_in_a_switch_warns_with_the_closest_match(site, monkeypatch, variable):
    """A misspelt name is one warning, with the variable, the name and the closest installed one; the list is there."""
    site.add_plugin("acme-hooks", ["grad_noise"])
    monkeypatch.setenv(variable, "grad-nose")
    with pytest.warns(PluginWarning, match=f"{variable} names 'grad-nose'.*did you mean 'grad_noise'") as caught:
        assert len(list_hooks()) == 1
    assert len(caught) == 1


def test_switching_off_an_official_hook_that_is_not_installed_is_no_mistake(site, monkeypatch, recwarn):
    """A job script may switch ``ema`` off wherever it runs."""
    monkeypatch.setenv("NVALCHEMI_HOOKS_DISABLE", "ema,nvalchemi-hooks-grad-clip:grad_clip")
    list_hooks()
    assert not recwarn.list


def test_a_plugin_for_another_core_is_incompatible(site):
    """The reason has the range and the installed version; the others are available."""
    site.add("nvalchemi-hooks", "2.0")
    site.add_plugin("old-hooks", ["old"], requires=["nvalchemi-hooks<2"])
    site.add_plugin("new-hooks", ["new"], requires=["nvalchemi-hooks>=2"])
    new, old = list_hooks()
    assert (new.state, old.state) == ("available", "incompatible")
    assert old.reason == "made for nvalchemi-hooks <2, and 2.0 is installed"


def test_two_distributions_with_one_name_clash(site):
    """Both are listed as a clash, and each reason names both distributions and how to choose."""
    site.add_plugin("acme-hooks", ["ema"], "1.0")
    site.add_plugin("zeta-hooks", ["ema"], "2.0")
    site.add_plugin("other-hooks", ["fine"])
    assert states() == {"acme-hooks:ema": "clash", "zeta-hooks:ema": "clash", "other-hooks:fine": "available"}
    for hook in list_hooks()[:2]:
        assert hook.reason == "acme-hooks 1.0 and zeta-hooks 2.0 offer it; write 'acme-hooks:ema' or 'zeta-hooks:ema'"


def test_what_cannot_be_used_does_not_clash(site, monkeypatch):
    """Switching one of two rivals off, or its being made for another core, leaves the other one available."""
    site.add("nvalchemi-hooks", "2.0")
    site.add_plugin("acme-hooks", ["ema"])
    site.add_plugin("zeta-hooks", ["ema"])
    site.add_plugin("old-hooks", ["ema"], requires=["nvalchemi-hooks<2"])
    monkeypatch.setenv("NVALCHEMI_HOOKS_DISABLE", "zeta-hooks:ema")
    assert states() == {"acme-hooks:ema": "available", "old-hooks:ema": "incompatible", "zeta-hooks:ema": "disabled"}


def test_one_distribution_that_declares_a_name_twice_is_told_so(site):
    """Two targets for one name in one distribution clash, and the reason says that its author has to mend it."""
    folder = site.add("acme-hooks", hooks={"noise": "a"})
    (folder / "entry_points.txt").write_text("[nvalchemi.hooks]\nnoise = a\nnoise = b\nnoise = a\n")
    refresh_hooks()
    assert [(hook.target, hook.state) for hook in list_hooks()] == [("a", "clash"), ("b", "clash")]
    assert "acme-hooks 1.0 declares it twice, for a and b" in list_hooks()[0].reason


def test_broken_is_known_once_the_plugin_was_loaded(site):
    """Before it is named it is available; after it failed it is broken with the cause; after a good load, available."""
    site.add("acme-hooks", hooks={"noise": "acme_hooks.plugin"}, modules={"acme_hooks.plugin": BROKEN})
    assert list_hooks()[0].state is HookState.AVAILABLE
    with pytest.raises(PluginLoadError):
        activate_hooks(["noise"])
    [hook] = list_hooks()
    assert (hook.state, hook.reason) == (HookState.BROKEN, "RuntimeError: no such driver")
    refresh_hooks()
    assert list_hooks()[0].state is HookState.AVAILABLE


def test_states_are_plain_strings_in_json(site):
    """A state is written as its word, so that programs need not know the enum."""
    assert json.dumps(HookState.NOT_ALLOWED) == '"not allowed"'


@pytest.mark.parametrize(
    ("requires", "core", "expected"),
    [
        ((), "1.0", ("", "")),
        (("torch>=2",), "1.0", ("", "")),
        (("nvalchemi-hooks",), "1.0", ("", "")),
        (("nvalchemi_hooks[ema] (>=1,<2)",), "1.5", ("<2,>=1", "")),
        (("NVAlchemi.Hooks>=1; python_version >= '3'",), "1.0", (">=1", "")),
        (("nvalchemi-hooks<1; python_version < '3'",), "5.0", ("", "")),
        (("nvalchemi-hooks<1; extra == 'test'",), "5.0", ("", "")),
        (("nvalchemi-hooks @ https://example.org/x.whl",), "5.0", ("", "")),
        (("nvalchemi-hooks>=1", "nvalchemi-hooks<2"), "1.0", ("<2,>=1", "")),
        (("nvalchemi-hooks-ema<1",), "5.0", ("", "")),
        (("nvalchemi-hooks>=9",), "0+unknown", (">=9", "")),
        (("nvalchemi-hooks>=0.1",), "0.2.dev1", (">=0.1", "")),
        (("nvalchemi-hooks<2; nonsense ===",), "3.0", ("<2", "made for nvalchemi-hooks <2, and 3.0 is installed")),
        (("nvalchemi-hooks==",), "3.0", ("==", "its range of nvalchemi-hooks versions cannot be read: '=='")),
    ],
)
def test_the_supported_range_is_read_as_an_installer_would(requires, core, expected):
    """Extras, other platforms, direct references and other spellings of the name are understood."""
    assert compatibility(requires, core) == expected


@settings(deadline=None, max_examples=60)
@given(low=st.integers(0, 5), high=st.integers(0, 5), core=st.integers(0, 5))
def test_a_core_inside_the_range_is_compatible_and_outside_is_not(low, high, core):
    """For every half-open range of versions, exactly the versions inside are accepted."""
    reason = compatibility((f"nvalchemi-hooks>={low},<{high}",), str(core)).reason
    assert (reason == "") == (low <= core < high)


@pytest.mark.parametrize(
    ("name", "hint"), [("EMA", "'ema'"), ("grad-clip", "'grad_clip'"), ("gradclip", "'grad_clip'")]
)
def test_case_and_dashes_do_not_hide_the_closest_match(name, hint):
    """The usual misspellings find what was meant."""
    assert hint in did_you_mean(name, ["ema", "grad_clip"])
