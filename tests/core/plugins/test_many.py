"""Two hundred plugins, five of them broken, beside a hundred distributions that have nothing to do with hooks."""

from __future__ import annotations

import json
import sys
import warnings

import pytest

from nvalchemi.errors import PluginLoadError, PluginWarning
from nvalchemi.hooks import HookState, activate_hooks, list_hooks, refresh_hooks

PLUGIN = """
from nvalchemi.hooks import HookOffer, hookimpl
class Made:
    def __init__(self): {init}
    def __call__(self, ctx, stage): pass
@hookimpl
def nvalchemi_hooks():
    {registration}
    return [HookOffer({name!r}, Made, default_kwargs={{}})]
"""


def plugin(name, init="pass", registration="pass"):
    return PLUGIN.format(name=name, init=init, registration=registration)


BROKEN = {
    "absent_import": ("import a_module_that_is_not_there", "ModuleNotFoundError"),
    "bad_syntax": ("def broken(:", "SyntaxError"),
    "bad_registration": (plugin("bad_registration", registration="raise KeyError('registering')"), "KeyError"),
    "gone_module": (None, "ModuleNotFoundError"),
    "bad_init": (plugin("bad_init", init="raise RuntimeError('in __init__')"), "RuntimeError"),
}
GOOD = [f"good_{number:03}" for number in range(195)]


@pytest.fixture
def crowded(site):
    """All of them, installed."""
    site.refreshes = False
    for name in GOOD:
        site.add_plugin(f"{name.replace('_', '-')}-hooks", [name], default_kwargs={})
    for name, (source, _) in BROKEN.items():
        module = f"{name}_hooks.plugin"
        modules = {module: source} if source else {}
        site.add(f"{name.replace('_', '-')}-hooks", "3.1", hooks={name: module}, modules=modules)
    for number in range(100):
        site.add(f"other-{number}")
    refresh_hooks()
    return site


def test_the_listing_has_them_all_and_imports_none(crowded):
    """Two hundred names, sorted, none of them known to be broken yet, and no plugin among the modules."""
    listed = list_hooks()
    assert [hook.name for hook in listed] == sorted([*GOOD, *BROKEN])
    assert {hook.state for hook in listed} == {HookState.AVAILABLE}
    assert not [module for module in sys.modules if module.endswith("_hooks.plugin")]


def test_each_broken_one_is_one_warning_and_every_good_one_is_usable(crowded):
    """Automatic activation makes 195 hooks and gives five warnings, each with distribution, version and cause."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        activated = activate_hooks("auto")
    assert [one.name for one in activated] == GOOD
    told = sorted(str(one.message) for one in caught if issubclass(one.category, PluginWarning))
    assert len(told) == len(caught) == len(BROKEN)
    for name, (_, cause) in BROKEN.items():
        assert [text for text in told if f"'{name}' of {name.replace('_', '-')}-hooks 3.1" in text and cause in text]
    assert [one.name for one in activate_hooks(GOOD)] == GOOD


@pytest.mark.parametrize("name", BROKEN)
def test_naming_a_broken_one_is_an_error_with_its_cause(crowded, name):
    """The error, or the note on the hook's own error, names the hook, its distribution and version, and the cause."""
    with pytest.raises((PluginLoadError, RuntimeError)) as caught:
        activate_hooks([name])
    error = caught.value
    text = " ".join([str(error), *getattr(error, "__notes__", ())])
    assert f"'{name}' of {name.replace('_', '-')}-hooks 3.1" in text
    assert BROKEN[name][1] in {type(error).__name__, type(error.__cause__).__name__}


COUNT_FILES = """
import json, os, sys
from nvalchemi.hooks import list_hooks
opened, root = [], {root!r}
def watch(event, arguments):
    if event == "open" and str(arguments[0]).startswith(root):
        opened.append(os.path.basename(str(arguments[0])))
sys.addaudithook(watch)
first = len(list_hooks())
count = {{name: opened.count(name) for name in opened}}
opened.clear()
second = len(list_hooks())
print(json.dumps([count, first == second, opened]))
"""


def test_listing_looks_into_every_distribution_once_and_reads_the_metadata_of_hooks_only(crowded):
    """Of 300 distributions 300 entry-point files are looked for, 200 metadata files read, and nothing a second time."""
    done = crowded.run("-c", COUNT_FILES.format(root=str(crowded.path)))
    assert json.loads(done.stdout) == [{"entry_points.txt": 300, "METADATA": 200}, True, []], done.stderr
