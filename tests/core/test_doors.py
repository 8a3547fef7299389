"""The public doors: lazy, sorted, and honest about what is installed."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path

import pytest

import nvalchemi
from nvalchemi.errors import HookNotInstalledError, PluginLoadError
from nvalchemi.hooks import refresh_hooks
from nvalchemi.official import OFFICIAL_HOOKS

DOORS = [
    "nvalchemi.hooks",
    "nvalchemi.testing",
    "nvalchemi.training",
    "nvalchemi.training.hooks",
    "nvalchemi.training.checkpoint",
    "nvalchemi.hooks.plugins",
]
TRAINING_DOORS = ["nvalchemi.training", "nvalchemi.training.hooks"]
CORE_NAMES = {
    "nvalchemi.hooks": {
        "ActivatedHook", "CheckpointableHook", "Closable", "Enterable", "GradientScaler", "Hook", "HookContext",
        "HookListing", "HookOffer", "HookRegistry", "HookState", "LooksAhead", "PreparesLoader",
        "Provenance", "ProvidesAveragedModel", "ProvidesExecutor", "ProvidesInferenceContext", "RunsOnStage",
        "TrainContext", "UpdateExecutor",
        "activate_hooks", "hookimpl", "list_hooks", "provenance_of", "refresh_hooks",
        "register_plugin",
    },
    "nvalchemi.training": {
        "HookTrace", "ModelSpec", "OptimizerConfig", "Snapshot", "TrainingStage", "TrainingStrategy", "Validation",
        "ValidationResult", "bare_module", "create_model_spec", "is_sharded", "like_sharded", "load_checkpoint",
        "load_training", "local_part", "save_checkpoint", "save_training", "take_snapshot",
    },
    "nvalchemi.training.checkpoint": {
        "LoadedModels", "Snapshot", "load_checkpoint", "load_training", "save_checkpoint", "save_training",
        "take_snapshot",
    },
    "nvalchemi.training.hooks": {
        "AlwaysVeto", "AverageOffer", "OptimizerPlan", "PassThrough", "Reading", "Shared", "StepOutcome",
        "TrainingUpdateHook", "TrainingUpdateOrchestrator", "UpdatePriority",
    },
    "nvalchemi.testing": {
        "AccumulatingHook", "FailingHook", "FakeSite", "HookConformance", "LossFactorHook", "RecordingHook",
        "StepCost", "TinyModel", "UpdateLoop", "VetoingHook", "fake_site", "poison", "tiny_batches", "tiny_strategy",
    },
}  # fmt: skip


@pytest.fixture
def no_plugins(monkeypatch):
    """An interpreter in which no official plugin can be found."""
    hide(monkeypatch, {hook.module for hook in OFFICIAL_HOOKS})


def hide(monkeypatch, modules):
    """Make these modules as good as not installed, and forget that a door has handed out their classes."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in modules else real(name, *rest))
    for door in map(importlib.import_module, TRAINING_DOORS):
        for hook in OFFICIAL_HOOKS:
            if hook.class_name in vars(door):
                monkeypatch.delitem(vars(door), hook.class_name)


@pytest.fixture
def fake_ema(tmp_path, monkeypatch):
    """Write a module that stands for the installed EMA plugin; the doors forget it afterwards."""
    hide(monkeypatch, {hook.module for hook in OFFICIAL_HOOKS} - {"nvalchemi_hooks_ema"})
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "nvalchemi_hooks_ema"}
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source):
        for name in list(sys.modules):
            if name.partition(".")[0] == "nvalchemi_hooks_ema":
                del sys.modules[name]
        folder = tmp_path / "nvalchemi_hooks_ema"
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text(source)
        importlib.invalidate_caches()

    yield write
    for door in map(importlib.import_module, TRAINING_DOORS):
        vars(door).pop("EMAHook", None)
    sys.modules.pop("nvalchemi_hooks_ema", None)
    sys.modules.update(kept)


@pytest.mark.parametrize("name", DOORS)
def test_all_is_sorted_and_is_what_dir_shows(name):
    """``__all__`` and ``dir()`` agree, are sorted, and hold every name once."""
    door = importlib.import_module(name)
    assert door.__all__ == sorted(set(door.__all__)) == dir(door)


@pytest.mark.parametrize("name", CORE_NAMES)
def test_every_name_of_the_core_is_behind_its_door(name, no_plugins):
    """Without any plugin each door holds exactly the documented names, and each can be had."""
    door = importlib.import_module(name)
    assert set(door.__all__) == CORE_NAMES[name]
    for public in door.__all__:
        assert getattr(door, public) is not None


@pytest.mark.parametrize("name", DOORS)
def test_what_the_type_checker_sees_is_what_there_is(name):
    """The names imported for type checkers are those that the door hands out, from the same modules."""
    door = importlib.import_module(name)
    tree = ast.parse(Path(inspect.getfile(door)).read_text())
    guarded = [node for block in tree.body if isinstance(block, ast.If) for node in block.body]
    seen = {alias.asname: node.module for node in guarded for alias in node.names}
    assert all(alias.name == alias.asname for node in guarded for alias in node.names)
    official = {hook.class_name: hook.module for hook in OFFICIAL_HOOKS} if name in TRAINING_DOORS else {}
    core = {public: module for public, module in seen.items() if public not in official}
    assert {public: seen.get(public) for public in official} == official
    assert set(core) == set(door.__all__) - set(official)
    for public, module in core.items():
        assert getattr(importlib.import_module(module), public) is getattr(door, public)


@pytest.mark.parametrize("name", TRAINING_DOORS)
@pytest.mark.parametrize("hook", OFFICIAL_HOOKS, ids=lambda hook: hook.class_name)
def test_a_missing_official_hook_says_what_to_install(name, hook, no_plugins):
    """The ImportError names class, distribution and extra; ``dir()`` and ``__all__`` do not show the class."""
    door = importlib.import_module(name)
    assert hook.class_name not in door.__all__
    assert hook.class_name not in dir(door)
    with pytest.raises(HookNotInstalledError) as caught:
        exec(f"from {name} import {hook.class_name}")
    assert isinstance(caught.value, ImportError)
    assert str(caught.value) == (
        f"{hook.class_name} is in the distribution {hook.distribution}, which is not installed: "
        f"pip install 'nvalchemi-hooks[{hook.extra}]'"
    )


@pytest.mark.parametrize("name", DOORS)
def test_a_star_import_and_inspect_work_without_plugins(name, no_plugins):
    """Nothing that is absent is touched by ``import *`` or ``inspect.getmembers``."""
    namespace = {}
    exec(f"from {name} import *", namespace)
    door = importlib.import_module(name)
    assert set(door.__all__) <= set(namespace)
    assert {member for member, _ in inspect.getmembers(door)} >= set(door.__all__)


@pytest.mark.parametrize("name", TRAINING_DOORS)
def test_an_installed_official_hook_is_handed_out_and_shown(name, fake_ema):
    """The class is the plugin's own, is listed, and is imported only when it is asked for."""
    fake_ema("class EMAHook: pass\n")
    door = importlib.import_module(name)
    assert "EMAHook" in door.__all__
    assert "EMAHook" in dir(door)
    assert "nvalchemi_hooks_ema" not in sys.modules
    assert door.EMAHook is sys.modules["nvalchemi_hooks_ema"].EMAHook


def test_an_installed_plugin_that_fails_keeps_its_own_cause(fake_ema):
    """Its own exception comes through with its type, and a note that says which distribution it was."""
    fake_ema("import a_module_that_is_not_there\n")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there") as caught:
        exec("from nvalchemi.training import EMAHook")
    assert caught.value.__notes__ == ["While importing EMAHook from the installed distribution nvalchemi-hooks-ema."]


@pytest.mark.parametrize("source", ["", "import sys\nsys.no_such_attribute\n"])
def test_an_attribute_error_of_a_plugin_is_not_swallowed(fake_ema, source):
    """Python would replace an AttributeError by a text of its own: it is the cause of an ImportError instead."""
    fake_ema(source)
    with pytest.raises(PluginLoadError, match="EMAHook cannot be imported from nvalchemi_hooks_ema") as caught:
        exec("from nvalchemi.training import EMAHook")
    assert isinstance(caught.value.__cause__, AttributeError)


def test_the_leftover_folder_of_an_uninstalled_plugin_is_not_the_plugin(fake_ema, tmp_path, monkeypatch):
    """A folder with nothing but old bytecode counts as not installed."""
    fake_ema("")
    assert "EMAHook" in dir(importlib.import_module("nvalchemi.training"))
    (tmp_path / "nvalchemi_hooks_ema" / "__init__.py").unlink()
    importlib.invalidate_caches()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert importlib.util.find_spec("nvalchemi_hooks_ema") is not None
    assert "EMAHook" not in dir(importlib.import_module("nvalchemi.training"))


@pytest.mark.parametrize("name", ["nvalchemi", *DOORS])
def test_an_unknown_name_is_an_attribute_error(name):
    """A name that no door has is an ordinary AttributeError with the door in it."""
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'Emahok'"):
        _ = importlib.import_module(name).Emahok


def test_submodules_can_be_imported_through_a_door():
    """``from nvalchemi.hooks import plugins`` gives the subpackage, although it is no public name."""
    from nvalchemi.hooks import plugins

    assert plugins.__name__ == "nvalchemi.hooks.plugins"


def test_the_top_level_has_its_version_and_nothing_else():
    """``dir(nvalchemi)`` is the version; refreshing does not disturb it."""
    refresh_hooks()
    assert dir(nvalchemi) == ["__version__"]
    assert nvalchemi.__version__
