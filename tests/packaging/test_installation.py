"""Installing from a clone, and from wheels: what lands, and who is asked for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def install(run, target: Path, *arguments: object, **options: object) -> None:
    """Let pip resolve and install into a folder, as into an empty environment."""
    run("-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-build-isolation", "--target", target, *arguments,
        **options)  # fmt: skip


def installed(target: Path) -> set[str]:
    """Return the names of ours in a folder."""
    names = {path.name.split("-")[0].replace("_", "-") for path in target.glob("*.dist-info")}
    return {name for name in names if name.startswith("nvalchemi")}


WAYS = {
    "the core": (["./core"], []),
    "one extra": (["./core[ema]"], ["ema"]),
    "two extras": (["./core[ema,grad-clip]"], ["ema", "grad-clip"]),
    "all": (
        ["./core[all]"],
        ["checkpoint", "distributed", "ema", "grad-accum", "grad-clip", "loss-scaling", "scaler-veto", "triton"],
    ),
    "by path": (["./core", "./plugins/scaler-veto"], ["scaler-veto"]),
    "extra and path": (["./core[ema]", "./plugins/ema"], ["ema"]),
}


@pytest.mark.parametrize(("arguments", "plugins"), WAYS.values(), ids=WAYS.keys())
def test_a_clone_installs_from_its_own_folders(
    run, clone: Path, registry, tmp_path: Path, arguments: list[str], plugins: list[str]
) -> None:
    """What was named is installed, and no registry is asked for a name of ours, though strangers offer all of them."""
    target = tmp_path / "target"
    install(run, target, "--index-url", registry.url, *arguments, cwd=clone)
    assert installed(target) == {"nvalchemi-hooks", *(f"nvalchemi-hooks-{plugin}" for plugin in plugins)}
    assert not (target / "stranger.py").exists()
    assert "torch" in registry.asked
    assert [name for name in registry.asked if name.startswith("nvalchemi")] == []


def test_pinned_extras_would_ask_the_registry(run, clone: Path, registry, tmp_path: Path) -> None:
    """The registry of these tests is a trap that works: a release build of the extras walks into it."""
    target = tmp_path / "target"
    install(run, target, "--index-url", registry.url, "./core[ema]", cwd=clone, NVALCHEMI_RELEASE="1")
    assert "nvalchemi-hooks-ema" in registry.asked
    assert (target / "stranger.py").exists()


def test_released_wheels_install_without_a_registry(run, plugin, registry, release_wheels, tmp_path: Path) -> None:
    """From a folder of released wheels, the extra of a plugin brings the core and this plugin."""
    target = tmp_path / "target"
    sources = ["--no-index", "--find-links", release_wheels.folder]
    for folder in registry.folder.iterdir():
        if not folder.name.startswith("nvalchemi"):
            sources += ["--find-links", folder]
    install(run, target, *sources, f"nvalchemi-hooks[{plugin.extra}]")
    assert installed(target) == {"nvalchemi-hooks", plugin.name}
    assert registry.asked == []


@pytest.fixture
def beside_core(run, plugin, release_wheels, tmp_path: Path) -> Path:
    """A folder with the core and one plugin, and nothing else."""
    target = tmp_path / "beside"
    wheels = [release_wheels[name].path for name in ("nvalchemi-hooks", plugin.name)]
    install(run, target, "--no-index", "--no-deps", *wheels)
    return target


def test_a_plugin_alone_beside_the_core_is_listed(run, plugin, beside_core: Path, version: str) -> None:
    """The command lists the hooks of the one plugin that is there, and needs no torch for it."""
    script = "from nvalchemi.cli import main; main()"
    rows = json.loads(run("-c", script, "hooks", "list", "--json", PYTHONPATH=str(beside_core)))
    rows = rows["hooks"] if isinstance(rows, dict) else rows
    ours = {row["name"]: row for row in rows if row["distribution"] == plugin.name}
    assert sorted(ours) == sorted(plugin.entry_points)
    assert {row["version"] for row in ours.values()} == {version}


def test_importing_the_doors_needs_no_torch(run, plugin, beside_core: Path) -> None:
    """The packages are lazy: their doors open in an environment that has no torch at all."""
    script = f"""
import importlib.util, sys
assert importlib.util.find_spec("torch") is None
import nvalchemi, nvalchemi.hooks, nvalchemi.training, nvalchemi.training.hooks, nvalchemi.training.stages
import {plugin.package}
print(sorted({{"torch", "pydantic"}} & set(sys.modules)))
"""
    assert run("-c", script, PYTHONPATH=str(beside_core)).strip() == "[]"
