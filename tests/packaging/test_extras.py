"""The extras of the core: folders of the clone, or exact versions in a release."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

FOR_AUTHORS = {"new": ["jinja2"], "testing": ["pytest"]}


def extras(wheel) -> dict[str, list[Requirement]]:
    """Return extra -> what it installs."""
    lines = [Requirement(line) for line in wheel.requirements]
    return {
        extra: [one for one in lines if one.marker and one.marker.evaluate({"extra": extra})]
        for extra in wheel.metadata.get_all("Provides-Extra")
    }


@pytest.fixture
def promised(distributions) -> dict[str, list[str]]:
    """Extra -> names of the distributions it brings."""
    single = {one.extra: [one.name] for one in distributions if one.extra}
    return {**single, "all": [name for names in single.values() for name in names], **FOR_AUTHORS}


@pytest.mark.parametrize("kind", ["clone_wheels", "release_wheels"])
def test_one_extra_a_plugin_and_all(kind: str, promised, request: pytest.FixtureRequest) -> None:
    """Each plugin has an extra of its own, `all` is every one of them, and what authors need is no part of it."""
    found = extras(request.getfixturevalue(kind)["nvalchemi-hooks"])
    assert {extra: [one.name for one in requirements] for extra, requirements in found.items()} == promised


@pytest.mark.parametrize("kind", ["clone_wheels", "release_wheels"])
def test_all_leaves_triton_itself_out(kind: str, request: pytest.FixtureRequest) -> None:
    """Who asks for the triton plugin gets triton; who asks for everything is spared its 700 MB."""
    found = extras(request.getfixturevalue(kind)["nvalchemi-hooks"])
    assert [one.extras for one in found["triton"]] == [{"triton"}]
    assert [one.name for one in found["all"] if one.extras] == []


def test_a_clone_names_its_own_folders(clone: Path, clone_wheels, distributions) -> None:
    """Built from a clone, an extra is the folder beside the core, blank in its path and all."""
    found = extras(clone_wheels["nvalchemi-hooks"])
    folders = {one.extra: (clone / one.folder).as_uri() for one in distributions if one.extra}
    assert {extra: found[extra][0].url for extra in folders} == folders


def test_a_release_names_versions_and_no_path(version: str, release_wheels) -> None:
    """A release holds no path of the machine that built it: every extra is this very version."""
    for wheel in release_wheels.values():
        assert "file:" not in wheel.read(f"{wheel.info}/METADATA")
    for extra, requirements in extras(release_wheels["nvalchemi-hooks"]).items():
        assert extra in FOR_AUTHORS or {str(one.specifier) for one in requirements} == {f"=={version}"}


def test_a_core_without_its_siblings_names_versions(run, clone: Path, tmp_path: Path, version: str, promised) -> None:
    """Where the plugins do not lie beside the core, its extras are versions, release or not."""
    shutil.copytree(clone / "core", tmp_path / "core")
    shutil.copy(clone / "VERSION", tmp_path)
    metadata = run("-m", "hatchling", "metadata", "optional-dependencies", cwd=tmp_path / "core")
    assert json.loads(metadata)["all"] == [f"{name}=={version}" for name in promised["all"]]


def test_a_release_switch_that_is_neither_is_refused(run, clone: Path, tmp_path: Path) -> None:
    """NVALCHEMI_RELEASE=yes does not quietly build wheels with paths in them."""
    with pytest.raises(AssertionError, match="NVALCHEMI_RELEASE is 'yes'; set it to 1"):
        run("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path, clone / "core",
            NVALCHEMI_RELEASE="yes")  # fmt: skip


@pytest.fixture
def sdist(run, distribution, clone: Path, tmp_path: Path) -> Path:
    """The sdist of a distribution, from a release build."""
    run("-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path / "sdist", cwd=clone / distribution.folder,
        NVALCHEMI_RELEASE="1")  # fmt: skip
    (path,) = (tmp_path / "sdist").glob("*.tar.gz")
    return path


def test_an_sdist_builds_the_same_wheel(run, distribution, sdist: Path, tmp_path: Path, release_wheels) -> None:
    """Away from the clone, with no VERSION and no sibling beside it, an sdist builds the wheel of the release."""
    run("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path, sdist)
    (path,) = tmp_path.glob("*.whl")
    original = release_wheels[distribution.name]
    rebuilt = type(original)(path)
    assert path.name == original.path.name
    assert rebuilt.files == original.files
    assert sorted(rebuilt.metadata.items()) == sorted(original.metadata.items())


def test_an_sdist_holds_source_and_no_tests(distribution, sdist: Path) -> None:
    """An sdist holds the package, what builds it, licence, README and changelog."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    outside = {name for name in names if not name.startswith("src/")}
    expected = {"CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
    assert outside - {"hatch_build.py", ".gitignore"} == expected
    assert ("hatch_build.py" in outside) == (distribution.extra is None)
