"""Loading plugins one at a time: the broken ones are named, the others work."""

from __future__ import annotations

import sys

import pytest

from nvalchemi.errors import PluginLoadError, PluginVersionError, PluginWarning
from nvalchemi.hooks import activate_hooks, list_hooks

OFFER = "from nvalchemi.hooks import HookOffer, hookimpl\nclass Made:\n    def __call__(self, ctx, stage): pass\n"

FAULTS = {
    "ImportError": "import a_module_that_is_not_there",
    "SyntaxError": "def broken(:",
    "RuntimeError": "raise RuntimeError('at import')",
    "SystemExit": "import sys; sys.exit('leaving')",
    "error in registration": OFFER + "@hookimpl\ndef nvalchemi_hooks():\n    raise KeyError('in registration')",
}


def add_broken(site, name, source):
    """Install a distribution whose plugin has this source."""
    module = f"{name}_hooks.plugin"
    site.add(f"{name}-hooks", "3.1", hooks={name: module}, modules={module: source})


def load_error(site, source, name="bad"):
    add_broken(site, name, source)
    with pytest.raises(PluginLoadError) as caught:
        activate_hooks([name])
    return str(caught.value)


@pytest.mark.parametrize("source", FAULTS.values(), ids=FAULTS)
def test_a_broken_plugin_is_one_warning_and_the_others_load(site, source):
    """Of three plugins the middle one fails: the other two work, and one warning has all that is needed."""
    site.add_plugin("a-hooks", ["a"], default_kwargs={})
    add_broken(site, "m", source)
    site.add_plugin("z-hooks", ["z"], default_kwargs={})
    with pytest.warns(PluginWarning) as caught:
        activated = activate_hooks("auto")
    assert [one.name for one in activated] == ["a", "z"]
    [warning] = caught
    for part in ("m-hooks", "3.1", "m = m_hooks.plugin", "NVALCHEMI_HOOKS_DISABLE=m"):
        assert part in str(warning.message)


def test_a_plugin_with_two_hooks_that_breaks_is_warned_of_once(site):
    """Two entry points that name one broken module give one warning, whose off switch names both."""
    site.add("acme-hooks", hooks={"b": "acme.plugin", "a": "acme.plugin"}, modules={"acme.plugin": "1 / 0"})
    with pytest.warns(PluginWarning, match="NVALCHEMI_HOOKS_DISABLE=a,b ") as caught:
        assert activate_hooks("auto") == []
    assert len(caught) == 1


@pytest.mark.parametrize("source", FAULTS.values(), ids=FAULTS)
def test_a_broken_plugin_that_is_named_is_an_error_with_its_cause(site, source):
    """The error names distribution, version and entry point; the plugin's own exception is its cause."""
    add_broken(site, "m", source)
    with pytest.raises(PluginLoadError, match=r"'m' of m-hooks 3.1 \(entry point m = m_hooks.plugin\)") as caught:
        activate_hooks(["m"])
    assert caught.value.__cause__ is not None
    assert type(caught.value.__cause__).__name__ in str(caught.value)


def test_a_broken_plugin_that_is_not_named_is_left_alone(site, recwarn):
    """Naming another hook imports only that one's plugin, and says nothing of the broken one."""
    site.add_plugin("a-hooks", ["a"])
    add_broken(site, "m", "1 / 0")
    assert len(activate_hooks(["a"])) == 1
    assert not recwarn.list
    assert "m_hooks.plugin" not in sys.modules


def test_a_missing_module_or_object_is_named(site):
    """An entry point whose module, or whose object in it, is gone fails with that name in the message."""
    site.add("gone-hooks", hooks={"gone": "gone_hooks.plugin"})
    with pytest.raises(PluginLoadError, match="No module named 'gone_hooks'"):
        activate_hooks(["gone"])
    site.add("half-hooks", hooks={"half": "half_hooks.plugin:missing"}, modules={"half_hooks.plugin": ""})
    with pytest.raises(PluginLoadError, match="'missing'"):
        activate_hooks(["half"])


@pytest.mark.parametrize("target", ["", "not a module!", "a..b"])
def test_a_target_that_is_no_reference_is_an_error_of_that_plugin(site, target):
    """Nonsense right of the equals sign is reported as the plugin's fault when it is named."""
    site.add("odd-hooks", hooks={"odd": target})
    with pytest.raises(PluginLoadError, match="odd-hooks 1.0"):
        activate_hooks(["odd"])


def test_a_failure_is_not_cached(site):
    """After the plugin's file was mended, the same process loads it."""
    add_broken(site, "m", "1 / 0")
    for _ in range(2):
        with pytest.raises(PluginLoadError, match="ZeroDivisionError"):
            activate_hooks(["m"])
    body = OFFER + "# mended\n@hookimpl\ndef nvalchemi_hooks():\n    return [HookOffer('m', Made)]\n"
    site.write_module("m_hooks.plugin", body)
    assert list_hooks()[0].state == "broken"
    assert activate_hooks(["m"])[0].name == "m"
    assert list_hooks()[0].state == "available"


def test_a_plugin_is_loaded_once(site):
    """Two activations call ``nvalchemi_hooks`` once, and make two hooks."""
    body = (
        OFFER + "calls = []\n@hookimpl\ndef nvalchemi_hooks():\n    calls.append(1)\n    yield HookOffer('m', Made)\n"
    )
    add_broken(site, "m", body)
    one, two = activate_hooks(["m", "m"])
    assert one.hook is not two.hook
    assert sys.modules["m_hooks.plugin"].calls == [1]


def test_an_entry_point_may_name_an_object(site):
    """``module:object`` registers the object, whose method is the implementation."""
    body = (
        OFFER + "class Plugin:\n    @hookimpl\n    def nvalchemi_hooks(self):\n        return [HookOffer('o', Made)]\n"
        "plugin = Plugin()\n"
    )
    site.add("o-hooks", hooks={"o": "o_hooks.plugin:plugin"}, modules={"o_hooks.plugin": body})
    assert activate_hooks(["o"])[0].name == "o"


def test_a_misspelt_hookimpl_is_named_with_the_right_name(site):
    """It would be accepted and never called; the message has the plugin, the wrong name and the right one."""
    message = load_error(site, OFFER + "@hookimpl\ndef nvalchemi_hook():\n    return []\n")
    assert "bad-hooks 3.1" in message
    assert "its @hookimpl 'nvalchemi_hook' implements no hook of nvalchemi; did you mean 'nvalchemi_hooks'?" in message


def test_a_second_hookimpl_with_an_unknown_name_is_refused_too(site):
    """A right implementation beside one that nothing calls is still a mistake."""
    body = "@hookimpl\ndef nvalchemi_hooks():\n    return [HookOffer('bad', Made)]\n"
    body += "@hookimpl\ndef configure():\n    pass\n"
    assert "its @hookimpl 'configure' implements no hook of nvalchemi; the only one is 'nvalchemi_hooks'" in load_error(
        site, OFFER + body
    )


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("", "it has no `@hookimpl def nvalchemi_hooks()`; write one"),
        ("def nvalchemi_hooks():\n    return []\n", "mark it with @hookimpl"),
        ("@hookimpl\ndef nvalchemi_hooks(config):\n    return []\n", "config"),
        (
            "@hookimpl\ndef nvalchemi_hooks():\n    pass\n",
            "nvalchemi_hooks() returned None; return a list of HookOffer",
        ),
        (
            "@hookimpl\ndef nvalchemi_hooks():\n    return HookOffer('bad', Made)\n",
            "nvalchemi_hooks() returned HookOffer",
        ),
        ("@hookimpl\ndef nvalchemi_hooks():\n    return [HookOffer('bad', Made), Made]\n", "gave a type at position 1"),
        ("@hookimpl\ndef nvalchemi_hooks():\n    return [HookOffer('bad', Made)] * 2\n", "offers 'bad' twice"),
        ("@hookimpl\ndef nvalchemi_hooks():\n    return [HookOffer('bda', Made)]\n", "no offer is called 'bad'"),
        ("@hookimpl\ndef nvalchemi_hooks():\n    return []\n", "it offers nothing under that name"),
        (
            "@hookimpl\ndef nvalchemi_hooks():\n    return [HookOffer('bad', 3)]\n",
            "factory is a int, which cannot be called",
        ),
        (
            "@hookimpl\ndef nvalchemi_hooks():\n    return [HookOffer('bad', Made), HookOffer('more', Made)]\n",
            "no entry point is called 'more'",
        ),
    ],
)
def test_a_wrong_offer_is_named(site, body, text):
    """Each way of offering something wrong has its sentence, with distribution and version in front."""
    message = load_error(site, OFFER + body)
    assert "'bad' of bad-hooks 3.1" in message
    assert text in message


def test_a_plugin_for_another_core_is_not_imported(site):
    """Naming it is an error with both versions; automatic activation warns with both; its code never runs."""
    site.add("nvalchemi-hooks", "2.0")
    site.add("old-hooks", hooks={"old": "old.plugin"}, modules={"old.plugin": "1 / 0"}, requires=["nvalchemi-hooks<2"])
    site.add_plugin("new-hooks", ["new"], default_kwargs={})
    with pytest.raises(PluginVersionError, match="made for nvalchemi-hooks <2, and 2.0 is installed"):
        activate_hooks(["old"])
    with pytest.warns(PluginWarning, match="made for nvalchemi-hooks <2, and 2.0 is installed") as caught:
        assert [one.name for one in activate_hooks("auto")] == ["new"]
    assert len(caught) == 1
    assert "old.plugin" not in sys.modules


def test_strict_mode_makes_a_broken_plugin_an_error(site, monkeypatch):
    """With ``NVALCHEMI_HOOKS_STRICT=1`` automatic activation raises what it would have warned of."""
    add_broken(site, "m", "1 / 0")
    monkeypatch.setenv("NVALCHEMI_HOOKS_STRICT", "1")
    with pytest.raises(PluginLoadError, match="m-hooks 3.1"):
        activate_hooks("auto")
    monkeypatch.setenv("NVALCHEMI_HOOKS_STRICT", "0")
    with pytest.warns(PluginWarning):
        activate_hooks("auto")


FAILURES = {
    "clash": lambda site: [site.add_plugin(f"{owner}-hooks", ["m"], default_kwargs={}) for owner in "yz"],
    "another core": lambda site: site.add_plugin("old-hooks", ["m"], default_kwargs={}, requires=["nvalchemi-hooks<2"]),
    "wrong offer": lambda site: add_broken(site, "m", OFFER),
    "constructor": lambda site: add_broken(
        site,
        "m",
        OFFER + "@hookimpl\ndef nvalchemi_hooks():\n    return [HookOffer('m', Made, default_kwargs={'no': 1})]\n",
    ),
}


@pytest.mark.parametrize("fails", FAILURES.values(), ids=FAILURES)
def test_strict_mode_makes_every_failure_an_error(site, monkeypatch, fails):
    """What automatic activation warns of and leaves out, whatever it is, stops the run with ``STRICT``."""
    site.add("nvalchemi-hooks", "2.0")
    fails(site)
    with pytest.warns(PluginWarning) as caught:
        assert activate_hooks("auto") == []
    assert len(caught) == 1
    monkeypatch.setenv("NVALCHEMI_HOOKS_STRICT", "1")
    with pytest.raises((PluginLoadError, LookupError, TypeError)):
        activate_hooks("auto")
