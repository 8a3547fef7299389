"""A stranger's wheel beside the core, and what `nvalchemi hooks new` writes, where there is no torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

SCRIPT = "from nvalchemi.cli import main; raise SystemExit(main())"


def build(run, source: Path, target: Path) -> Path:
    """Build a wheel from a copy of a source."""
    copied = shutil.copytree(source, target / "source", ignore=shutil.ignore_patterns("__pycache__"))
    run("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", target, copied)
    (wheel,) = target.glob("*.whl")
    return wheel


def installed(run, target: Path, *wheels: Path) -> Path:
    """Install wheels, and nothing else, into a folder."""
    run("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", target, *wheels)
    return target


@pytest.fixture(scope="module")
def example(run, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the example."""
    return build(run, root / "docs" / "examples" / "third-party-hook", tmp_path_factory.mktemp("example"))


def test_a_strangers_wheel_beside_the_core_is_found(run, example: Path, release_wheels, tmp_path: Path) -> None:
    """In an environment with the core and this wheel alone, the hook is listed as available, by metadata."""
    target = installed(run, tmp_path / "site", release_wheels["nvalchemi-hooks"].path, example)
    rows = json.loads(run("-c", SCRIPT, "hooks", "list", "--json", PYTHONPATH=str(target)))
    assert [(row["name"], row["distribution"], row["state"]) for row in rows] == [
        ("grad_centralization", "grad-centralization", "available")
    ]


def test_its_plugin_is_imported_without_torch(run, example: Path, release_wheels, tmp_path: Path) -> None:
    """Door and plugin module open where there is no torch at all."""
    target = installed(run, tmp_path / "site", release_wheels["nvalchemi-hooks"].path, example)
    script = "import grad_centralization.plugin, sys; print(dir(grad_centralization), 'torch' in sys.modules)"
    assert run("-c", script, PYTHONPATH=str(target)).strip() == "['GradCentralizationHook'] False"


def test_the_wheel_of_the_core_brings_the_whole_template(run, release_wheels, tmp_path: Path) -> None:
    """From the installed wheel, the new distribution is written, built and found; files with a dot in front, too."""
    core = installed(run, tmp_path / "core", release_wheels["nvalchemi-hooks"].path)
    written = tmp_path / "written"
    run("-c", SCRIPT, "hooks", "new", "my-hook", "--defaults", "--output", written, PYTHONPATH=str(core))
    assert (written / ".github" / "workflows" / "tests.yml").is_file()
    assert (written / ".gitignore").is_file()
    target = installed(run, tmp_path / "site", release_wheels["nvalchemi-hooks"].path, build(run, written, tmp_path))
    rows = json.loads(run("-c", SCRIPT, "hooks", "list", "--json", PYTHONPATH=str(target)))
    assert [(row["name"], row["state"]) for row in rows] == [("my_hook", "available")]
