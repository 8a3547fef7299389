"""What each wheel holds and says of itself."""

from __future__ import annotations

import ast
import configparser
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Looked for by an optional part of the core, and no dependency of it; triton comes with a CUDA build of torch.
OPTIONAL = {"jinja2", "numpy", "pytest", "triton"}


def test_every_file_of_the_package_is_in_the_wheel(distribution, clone: Path, release_wheels) -> None:
    """The wheel holds the package folder, whole, and nothing beside it but its own metadata."""
    wheel = release_wheels[distribution.name]
    source = clone / distribution.folder / "src"
    files = (path for path in (source / distribution.package).rglob("*") if path.is_file())
    expected = {path.relative_to(source).as_posix() for path in files}
    assert {name for name in wheel.files if not name.startswith(f"{wheel.info}/")} == expected
    assert any(name.endswith(".py") for name in expected)


def test_the_package_is_typed(distribution, release_wheels) -> None:
    """A type checker is told that the annotations of the package are meant for it."""
    assert f"{distribution.package}/py.typed" in release_wheels[distribution.name].files


def test_versions_are_in_step(distribution, version: str, release_wheels) -> None:
    """Every distribution has the version of the file VERSION."""
    assert release_wheels[distribution.name].metadata["Version"] == version


def test_the_hooks_are_announced(distribution, release_wheels) -> None:
    """The entry points are those a user is promised, and the core alone brings a command."""
    wheel = release_wheels[distribution.name]
    parser = configparser.ConfigParser(delimiters=("=",))
    parser.read_string(wheel.read(f"{wheel.info}/entry_points.txt"))
    groups = {section: dict(parser[section]) for section in parser.sections()}
    if distribution.extra is None:
        assert groups == {"console_scripts": {"nvalchemi": "nvalchemi.cli:main"}}
    else:
        assert groups == {"nvalchemi.hooks": distribution.entry_points}


def test_entry_points_name_modules_of_the_wheel(plugin, release_wheels) -> None:
    """What an entry point names is in the same wheel."""
    files = release_wheels[plugin.name].files
    for target in plugin.entry_points.values():
        assert f"{target.replace('.', '/')}.py" in files


def test_a_plugin_needs_the_core_and_no_sibling(plugin, version: str, release_wheels) -> None:
    """Of ours a plugin asks for the core alone, in a range that holds the version it is released with."""
    requirements = [Requirement(line) for line in release_wheels[plugin.name].requirements]
    ours = [one for one in requirements if one.name in release_wheels]
    assert [one.name for one in ours] == ["nvalchemi-hooks"]
    assert ours[0].specifier.contains(version)
    assert {one.operator for one in ours[0].specifier} == {">=", "<"}


def test_what_is_imported_is_asked_for(distribution, clone: Path, release_wheels, distributions) -> None:
    """Every third-party package that the code imports is a dependency of that distribution itself."""
    requirements = [Requirement(line) for line in release_wheels[distribution.name].requirements]
    declared = {canonicalize_name(one.name) for one in requirements if one.marker is None}
    imported = {
        name
        for path in (clone / distribution.folder / "src").rglob("*.py")
        for name in top_level_imports(path)
        if name not in sys.stdlib_module_names
    }
    ours = {one.package for one in distributions}
    assert {canonicalize_name(name) for name in imported - ours - OPTIONAL} <= declared


def top_level_imports(path: Path) -> set[str]:
    """Return the first part of every absolute import in a file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_the_metadata_introduces_the_distribution(distribution, root: Path, release_wheels) -> None:
    """Name, Python, licence with its text, and the README stand in the metadata."""
    wheel = release_wheels[distribution.name]
    metadata = wheel.metadata
    assert metadata["Name"] == distribution.name
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert wheel.read(f"{wheel.info}/licenses/LICENSE") == (root / "LICENSE").read_text()
    assert (root / distribution.folder / "README.md").read_text().strip() in metadata.get_payload()


def test_building_leaves_the_tree_clean(root: Path, clone: Path, clone_wheels) -> None:
    """After a build the folders hold what they held: no stale metadata can hide an entry point later."""
    for folder in ("core", "plugins"):
        assert paths(clone / folder) == paths(root / folder)


def paths(folder: Path) -> set[Path]:
    """Return every path below a folder, but for what Python and the tools keep for themselves."""
    found = (path.relative_to(folder) for path in folder.rglob("*"))
    return {path for path in found if not any(part.endswith(("__pycache__", "_cache")) for part in path.parts)}
