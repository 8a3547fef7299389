"""The repository keeps its promises to somebody who has just cloned it."""

from __future__ import annotations

import ast
import os
import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement


def test_ci_runs_the_test_command_of_the_readme(root: Path) -> None:
    """What CI runs is, word for word, the command that the README prints."""
    command = (root / ".ci" / "run").read_text().strip().splitlines()[-1]
    assert command in (root / "README.md").read_text().splitlines()
    assert os.access(root / ".ci" / "run", os.X_OK)


def test_constraints_pin_everything_exactly(root: Path) -> None:
    """Each constraint is one exact version, torch first, and no name of ours is among them."""
    lines = [line for line in (root / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = [Requirement(line) for line in lines]
    assert lines[0] == "torch==2.13.0"
    assert all([one.operator for one in pin.specifier] == ["=="] for pin in pins)
    assert not [pin.name for pin in pins if pin.name.startswith("nvalchemi")]


def test_constraints_hold_every_dependency(root: Path, distributions) -> None:
    """Every dependency of every distribution is pinned, at a version that the distribution accepts."""
    lines = (root / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    for one in distributions:
        project = tomllib.loads((root / one.folder / "pyproject.toml").read_text())["project"]
        extras = project.get("optional-dependencies", {}).values()
        for requirement in map(Requirement, [*project["dependencies"], *chain.from_iterable(extras)]):
            if not requirement.name.startswith("nvalchemi"):
                assert requirement.specifier.contains(pins[requirement.name]), f"{one.name}: {requirement}"


def test_every_plugin_has_its_folder_and_extra(root: Path, distributions) -> None:
    """The folders under plugins/ and the extras of the core are the same list."""
    folders = {path.parent.name for path in (root / "plugins").glob("*/pyproject.toml")}
    assert folders == {one.extra for one in distributions if one.extra}


def test_every_changelog_tells_of_this_version(distribution, root: Path, version: str) -> None:
    """The newest entry of each changelog is the current version."""
    text = (root / distribution.folder / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (.+)$", text, re.MULTILINE)[0] == version


@pytest.fixture
def layers(root: Path) -> set[str]:
    """Every module that the contract of the layers names."""
    contracts = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (one for one in contracts if one["id"] == "layers")
    return set(re.findall(r"[\w.]+", " ".join(contract["layers"])))


def test_every_module_of_the_core_has_a_layer(root: Path, layers: set[str]) -> None:
    """No module escapes the layers: it, or a package around it, stands in one; only the doors do not."""
    source = root / "core" / "src"
    modules = [
        path.relative_to(source).with_suffix("").as_posix().replace("/", ".")
        for path in source.rglob("*.py")
        if path.name != "__init__.py"
    ]
    assert modules
    assert [name for name in modules if not any(f"{name}.".startswith(f"{layer}.") for layer in layers)] == []


def test_plugins_come_in_through_the_public_doors(plugin, root: Path) -> None:
    """A plugin imports from the public packages of the core and its errors, and from no module behind them."""
    doors = {"nvalchemi.errors", "nvalchemi.hooks", "nvalchemi.training", "nvalchemi.training.hooks"}
    imported = {
        node.module
        for path in (root / plugin.folder / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module
    }
    assert "nvalchemi.hooks" in imported
    assert {name for name in imported if name.partition(".")[0] == "nvalchemi"} <= doors
