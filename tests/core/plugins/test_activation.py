"""From a configuration to hooks, whatever form it has."""

from __future__ import annotations

import logging
import sys

import pytest

from nvalchemi.errors import HookNameClashError, HookSwitchedOffError, PluginWarning, UnknownHookError
from nvalchemi.hooks import ActivatedHook, Provenance, activate_hooks

STRICT_FACTORY = """
from pydantic import BaseModel, Field
from nvalchemi.hooks import HookOffer, hookimpl

class Hook(BaseModel, extra="forbid"):
    max_norm: float = Field(1.0, gt=0)
    priority: int = 50
    def __call__(self, ctx, stage): pass

def plain(*, eta): return Hook()

@hookimpl
def nvalchemi_hooks():
    return [
        HookOffer("clip", Hook, default_kwargs={"max_norm": 2.0}),
        HookOffer("noise", plain),
        HookOffer("nothing", lambda: None),
    ]
"""


class Own:
    """A hook of the running test."""

    frequency = 1
    stage = None

    def __call__(self, ctx, stage):
        pass


@pytest.fixture
def strict_site(site):
    """A distribution with hooks that check their arguments."""
    module = "strict_hooks.plugin"
    names = ("clip", "noise", "nothing")
    site.add("strict-hooks", "0.3", hooks=dict.fromkeys(names, module), modules={module: STRICT_FACTORY})
    return site


def test_a_list_of_names_arguments_and_hooks_keeps_its_order(site):
    """Each form of an item gives one hook, in the order of the list, with its name and provenance."""
    site.add_plugin("acme-hooks", ["b", "a"], "1.2")
    own = Own()
    first, second, third = activate_hooks(["b", {"a": {"eta": 0.5}}, own])
    assert (first.name, first.label, first.provenance) == ("b", None, Provenance("acme-hooks", "1.2"))
    assert (second.name, second.hook.kwargs) == ("a", {"eta": 0.5})
    assert (third.name, third.hook, third.label) == (None, own, None)


def test_a_mapping_gives_its_keys_as_labels(site):
    """Two hooks of one name are told apart by label, and a hook that is built already can have one too."""
    site.add_plugin("acme-hooks", ["ema"])
    config = {"fast": {"ema": {"decay": 0.9}}, "slow": {"ema": {"decay": 0.999}}, "plain": "ema", "own": Own()}
    activated = activate_hooks(config)
    assert [one.label for one in activated] == ["fast", "slow", "plain", "own"]
    assert [one.hook.kwargs for one in activated[:3]] == [{"decay": 0.9}, {"decay": 0.999}, {}]


@pytest.mark.parametrize("config", [None, [], (), {}])
def test_nothing_configured_activates_nothing(site, config):
    """Installed is not active."""
    site.add_plugin("acme-hooks", ["noise"], default_kwargs={})
    assert activate_hooks(config) == []
    assert "acme_hooks.plugin" not in sys.modules


def test_one_item_alone_needs_no_list(site):
    """A single name or a single hook is taken as a list of one."""
    site.add_plugin("acme-hooks", ["noise"])
    own = Own()
    assert [one.name for one in activate_hooks("noise")] == ["noise"]
    assert [one.hook for one in activate_hooks(own)] == [own]


def test_only_the_named_plugins_are_imported(site):
    """Naming one hook leaves the other plugin's module out of sys.modules."""
    used, unused = site.add_plugin("a-hooks", ["a"]), site.add_plugin("b-hooks", ["b"])
    activate_hooks(["a"])
    assert used in sys.modules
    assert unused not in sys.modules


def test_auto_takes_what_has_defaults_by_priority_then_name(site):
    """Hooks without default arguments stay out; the others are sorted by the hook's priority, then by name."""
    site.add_plugin("none-hooks", ["none"])
    site.add_plugin("late-hooks", ["d", "b"], default_kwargs={"priority": 50})
    site.add_plugin("early-hooks", ["z"], default_kwargs={"priority": 10})
    site.add_plugin("mid-hooks", ["c"], default_kwargs={})
    assert [one.name for one in activate_hooks("auto")] == ["z", "b", "c", "d"]


def test_auto_never_loads_what_is_switched_off(site, monkeypatch, recwarn):
    """Disabled and not allowed hooks are left out without a word, before their code is imported."""
    modules = [site.add_plugin(f"{name}-hooks", [name], default_kwargs={}) for name in "abc"]
    monkeypatch.setenv("NVALCHEMI_HOOKS_DISABLE", "a")
    monkeypatch.setenv("NVALCHEMI_HOOKS_ALLOW", "a,b")
    assert [one.name for one in activate_hooks("auto")] == ["b"]
    assert [module in sys.modules for module in modules] == [False, True, False]
    assert not recwarn.list


@pytest.mark.parametrize(("variable", "value"), [("DISABLE", "noise"), ("DISABLE", "*"), ("ALLOW", "other")])
def test_naming_what_is_switched_off_is_an_error_before_import(site, monkeypatch, variable, value):
    """The message names the hook, its distribution and the variable; none of its code runs."""
    module = site.add_plugin("acme-hooks", ["noise", "other"])
    monkeypatch.setenv(f"NVALCHEMI_HOOKS_{variable}", value)
    with pytest.raises(HookSwitchedOffError, match=f"'noise' of acme-hooks 1.0 .*NVALCHEMI_HOOKS_{variable}"):
        activate_hooks(["noise"])
    assert module not in sys.modules


def test_an_unknown_name_in_a_switch_warns_or_in_strict_mode_raises(site, monkeypatch):
    """A misspelt off switch would let the hook run: it is said, and with STRICT it stops the run."""
    site.add_plugin("acme-hooks", ["noise"])
    monkeypatch.setenv("NVALCHEMI_HOOKS_DISABLE", "noize")
    with pytest.warns(PluginWarning, match="did you mean 'noise'"):
        activate_hooks(None)
    monkeypatch.setenv("NVALCHEMI_HOOKS_STRICT", "1")
    with pytest.raises(UnknownHookError, match="did you mean 'noise'"):
        activate_hooks(None)


def test_an_unknown_name_gives_the_closest_match_and_what_there_is(site):
    """The message has the name, the closest one, and all that are installed."""
    site.add_plugin("acme-hooks", ["noise", "centre"])
    with pytest.raises(
        UnknownHookError, match=r"called 'noize'; did you mean 'noise'\? \(installed are centre, noise\)"
    ):
        activate_hooks(["noize"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ema", "nvalchemi-hooks-ema, which is not installed: pip install 'nvalchemi-hooks[ema]'"),
        (
            "mixed_precision",
            "nvalchemi-hooks-loss-scaling, which is not installed: pip install 'nvalchemi-hooks[loss-scaling]'",
        ),
        ("nvalchemi-hooks-ema:ema", "pip install 'nvalchemi-hooks[ema]'"),
        ("grad_clipp", "did you mean 'grad_clip' or 'grad_accum'? It is official: pip install 'nvalchemi-hooks[all]'"),
        ("zzz", "no hooks are installed"),
        ("acme-hooks:ema", "no installed hook is called 'acme-hooks:ema'"),
    ],
)
def test_an_official_hook_that_is_not_installed_gives_the_command(site, name, text):
    """Naming it, or nearly, says which distribution has it and how to install it."""
    with pytest.raises(UnknownHookError) as caught:
        activate_hooks([name])
    assert text in str(caught.value)


def test_a_clash_names_both_and_a_distribution_chooses(site):
    """The bare name is an error with both distributions; ``distribution:name``, in any spelling, chooses."""
    site.add_plugin("acme-hooks", ["ema"], "1.0")
    site.add_plugin("zeta-hooks", ["ema"], "2.0")
    with pytest.raises(
        HookNameClashError, match="acme-hooks 1.0 and zeta-hooks 2.0 offer it; write 'acme-hooks:ema' or"
    ):
        activate_hooks(["ema"])
    assert activate_hooks(["Zeta_Hooks:ema"])[0].provenance == Provenance("zeta-hooks", "2.0")
    assert activate_hooks([{"acme-hooks:ema": {"decay": 0.5}}])[0].hook.kwargs == {"decay": 0.5}


def test_a_rival_that_is_switched_off_does_not_stand_in_the_way(site, monkeypatch):
    """With one of two rivals switched off, the bare name means the other one."""
    site.add_plugin("acme-hooks", ["ema"], "1.0")
    site.add_plugin("zeta-hooks", ["ema"], "2.0")
    monkeypatch.setenv("NVALCHEMI_HOOKS_DISABLE", "acme-hooks:ema")
    assert activate_hooks(["ema"])[0].provenance == Provenance("zeta-hooks", "2.0")


def test_auto_leaves_a_clash_out_with_one_warning(site, monkeypatch):
    """Neither rival joins, nor is imported; both are named once; with STRICT it is an error."""
    modules = [site.add_plugin(f"{name}-hooks", ["ema"], default_kwargs={}) for name in ("acme", "zeta")]
    site.add_plugin("other-hooks", ["fine"], default_kwargs={})
    with pytest.warns(PluginWarning, match="acme-hooks 1.0 and zeta-hooks 1.0") as caught:
        assert [one.name for one in activate_hooks("auto")] == ["fine"]
    assert len(caught) == 1
    assert not set(modules) & set(sys.modules)
    monkeypatch.setenv("NVALCHEMI_HOOKS_STRICT", "yes")
    with pytest.raises(HookNameClashError):
        activate_hooks("auto")


def test_arguments_override_the_defaults_of_the_offer(strict_site):
    """A bare name uses the offer's defaults; the configuration's own arguments win one by one; None is no arguments."""
    config = ["clip", {"clip": {"priority": 7}}, {"clip": {"max_norm": 5.0}}, {"clip": None}]
    hooks = [one.hook for one in activate_hooks(config)]
    assert [(hook.max_norm, hook.priority) for hook in hooks] == [(2.0, 50), (2.0, 7), (5.0, 50), (2.0, 50)]


@pytest.mark.parametrize(
    ("config", "kind", "text"),
    [
        ({"noise": {"etta": 0.1}}, TypeError, "etta"),
        ("noise", TypeError, "eta"),
        ({"clip": {"max_norm": -1.0}}, ValueError, "max_norm"),
        ({"clip": {"max_nom": 1.0}}, ValueError, "max_nom"),
        ("nothing", TypeError, "the factory returned a NoneType, which is no hook"),
    ],
)
def test_an_error_of_the_factory_keeps_its_type_and_gets_a_note(strict_site, config, kind, text):
    """TypeError and pydantic's ValidationError stay what they are; the note has hook, distribution and version."""
    with pytest.raises(kind, match=text) as caught:
        activate_hooks([config])
    name = config if isinstance(config, str) else next(iter(config))
    [note] = caught.value.__notes__
    assert note.startswith(f"While building the hook {name!r} of strict-hooks 0.3 (entry point {name} = ")
    if kind is ValueError:
        assert type(caught.value).__name__ == "ValidationError"


def test_a_default_that_its_own_factory_refuses_is_one_warning_in_auto(site):
    """A hook that cannot be built from its defaults is left out by name, and its neighbours in the plugin join."""
    source = """
    from nvalchemi.hooks import HookOffer, hookimpl

    def bad(**kwargs):
        raise ValueError("eta is missing")

    class Good:
        def __call__(self, ctx, stage): pass

    @hookimpl
    def nvalchemi_hooks():
        return [HookOffer("bad", bad, default_kwargs={}), HookOffer("good", Good, default_kwargs={})]
    """
    site.add("acme-hooks", hooks=dict.fromkeys(["bad", "good"], "acme.plugin"), modules={"acme.plugin": source})
    with pytest.warns(
        PluginWarning, match="ValueError: eta is missing While building the hook 'bad' of acme-hooks 1.0"
    ) as w:
        assert [one.name for one in activate_hooks("auto")] == ["good"]
    assert len(w) == 1


@pytest.mark.parametrize(
    ("config", "kind", "text"),
    [
        (3, TypeError, 'hooks is a int; give "auto", a list of hooks, or a mapping'),
        ([3], TypeError, r"hooks\[0\] is 3, a int; give the name of an installed hook"),
        (["noise", None], TypeError, r"hooks\[1\] is None, a NoneType"),
        ([["noise"]], TypeError, r"hooks\[0\] is \['noise'\], a list"),
        ([Own], TypeError, r"hooks\[0\] is the class Own; give an instance: Own\(\)"),
        (Own, TypeError, r"hooks is the class Own; give an instance"),
        (
            [{"noise": {}, "other": {}}],
            ValueError,
            r"hooks\[0\] is .*a mapping has one name with its keyword arguments",
        ),
        ([{}], ValueError, r"hooks\[0\] is \{\}; a mapping has one name"),
        ([{"noise": 1.0}], ValueError, r"hooks\[0\] is \{'noise': 1.0\}; a mapping has one name"),
        ([{"noise": {1: 2}}], ValueError, r"a mapping has one name with its keyword arguments"),
        (
            {"grad_clip": {"max_norm": 1.0}},
            ValueError,
            r"in a mapping the key is a label, so write \{'grad_clip': \{name: arguments\}\}, or a list",
        ),
        ({3: "noise"}, TypeError, r"hooks\[3\]: a label is a non-empty string, not 3"),
        ({"": "noise"}, TypeError, r"a label is a non-empty string, not ''"),
        (["auto"], ValueError, r'hooks\[0\] is "auto", which stands alone: hooks="auto"'),
    ],
)
def test_a_wrong_configuration_is_refused_with_place_value_and_remedy(site, config, kind, text):
    """Every wrong form has a sentence with where it is, what it is, and what to write instead."""
    site.add_plugin("acme-hooks", ["noise", "other"])
    with pytest.raises(kind, match=text):
        activate_hooks(config)


def test_what_joined_is_logged(site, caplog):
    """Label, name, distribution and version of each hook that joined are in the log."""
    site.add_plugin("acme-hooks", ["noise"], "1.2")
    with caplog.at_level(logging.INFO, logger="nvalchemi.hooks"):
        activate_hooks({"soft": "noise", "own": Own()})
    assert [record.message for record in caplog.records] == [
        "activated soft: noise (acme-hooks 1.2)",
        "activated own: Own (no installed distribution)",
    ]


def test_an_activated_hook_is_plain_data():
    """Label, hook, provenance and name, in this order; frozen."""
    one = ActivatedHook("label", object(), None, "name")
    assert (one.label, one.provenance, one.name) == ("label", None, "name")
    with pytest.raises(AttributeError):
        one.label = "other"
