"""Plugins that a program registers itself: frozen applications have no metadata."""

from __future__ import annotations

import importlib

import pytest

from nvalchemi import metadata
from nvalchemi.errors import HookSwitchedOffError, PluginLoadError
from nvalchemi.hooks import HookOffer, HookState, activate_hooks, hookimpl, list_hooks, provenance_of, refresh_hooks
from nvalchemi.hooks import register_plugin as register
from nvalchemi.hooks.plugins import static
from nvalchemi.testing import FakeSite


@pytest.fixture(autouse=True)
def unregistered(monkeypatch):
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(metadata, "_added", {})
    monkeypatch.setattr(static, "offers", {})
    yield
    refresh_hooks()


@pytest.fixture
def frozen(site):
    """A plugin whose code is there and whose metadata is not."""
    module = site.add_plugin("acme-hooks", ["noise", "centre"], default_kwargs={})
    (site.path / "acme_hooks-1.0.dist-info" / "METADATA").unlink()
    (site.path / "acme_hooks-1.0.dist-info" / "entry_points.txt").unlink()
    refresh_hooks()
    assert list_hooks() == []
    return importlib.import_module(module)


def test_a_registered_plugin_is_listed_named_and_activated_like_any_other(frozen):
    """Its hooks are available under their names and under ``distribution:name``, and join ``"auto"``."""
    register(frozen, version="4.2")
    assert [(hook.qualified_name, hook.version, hook.target, hook.state) for hook in list_hooks()] == [
        ("acme-hooks:centre", "4.2", "acme_hooks.plugin", HookState.AVAILABLE),
        ("acme-hooks:noise", "4.2", "acme_hooks.plugin", HookState.AVAILABLE),
    ]
    [one] = activate_hooks(["acme-hooks:noise"])
    assert str(one.provenance) == str(provenance_of(one.hook)) == "acme-hooks 4.2"
    assert [one.name for one in activate_hooks("auto")] == ["centre", "noise"]


def test_a_refresh_keeps_it_and_twice_is_once(frozen):
    """Registering is the program's word: a new scan, a failed one or a second registration does not change it."""
    for _ in range(2):
        register(frozen)
        refresh_hooks()
    assert [(hook.name, hook.version, str(hook.state)) for hook in list_hooks()] == [
        ("centre", "0+unknown", "available"),
        ("noise", "0+unknown", "available"),
    ]
    assert len(activate_hooks(["noise"])) == 1


def test_switches_hold_for_it(frozen, monkeypatch):
    """``NVALCHEMI_HOOKS_DISABLE`` reaches a registered hook as well."""
    register(frozen)
    monkeypatch.setenv("NVALCHEMI_HOOKS_DISABLE", "noise")
    with pytest.raises(HookSwitchedOffError, match="'noise' of acme-hooks"):
        activate_hooks(["noise"])


def test_where_there_is_metadata_the_distribution_still_counts_once(site):
    """The version is read from it by default; the hooks are no clash with themselves."""
    module = site.add_plugin("acme-hooks", ["noise"], "1.7")
    register(importlib.import_module(module))
    assert [(hook.version, str(hook.state)) for hook in list_hooks()] == [("1.7", "available")]


def test_another_distribution_with_that_name_is_a_clash(site, frozen):
    """A registered hook is chosen by ``distribution:name`` where an installed one has its name."""
    site.add_plugin("zeta-hooks", ["noise"])
    register(frozen, distribution="our-app")
    clash = {hook.qualified_name for hook in list_hooks() if hook.state is HookState.CLASH}
    assert clash == {"our-app:noise", "zeta-hooks:noise"}
    assert str(activate_hooks(["our-app:noise"])[0].provenance).startswith("our-app ")


def test_an_object_of_the_program_itself_can_be_registered(site):
    """What need not be a module: an object with the implementation as a method."""

    class Plugin:
        @hookimpl
        def nvalchemi_hooks(self):
            return [HookOffer("own", lambda: print)]

    register(Plugin(), distribution="our-app", version="1")
    assert activate_hooks("own")[0].hook is print


@pytest.mark.parametrize("plugin", [object(), FakeSite, "acme_hooks.plugin"])
def test_what_is_no_plugin_is_refused_and_changes_nothing(site, plugin):
    """The error names what was given and what it lacks; nothing is listed."""
    with pytest.raises(PluginLoadError, match="cannot be registered: AttributeError: it has no `@hookimpl def"):
        register(plugin)
    assert list_hooks() == []
