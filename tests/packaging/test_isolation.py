"""An environment holds the distributions of ours that it says it holds, installed as wheels, and no other."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sysconfig
from pathlib import Path

import pytest

VARIABLE = "NVALCHEMI_EXPECTED_DISTRIBUTIONS"


@pytest.fixture
def expected() -> set[str]:
    """The names this environment was made for."""
    assert VARIABLE in os.environ, f"{VARIABLE} is not set; it holds the distributions to expect, and tox sets it"
    return set(os.environ[VARIABLE].split())


def test_just_the_expected_distributions_are_installed(expected: set[str]) -> None:
    """Of our names, the environment knows those it was made for and no sibling, each once."""
    names = [one.metadata["Name"] for one in importlib.metadata.distributions()]
    assert sorted(name for name in names if name.startswith("nvalchemi")) == sorted(expected)


def test_just_the_expected_packages_can_be_found(expected: set[str], distributions) -> None:
    """A package of a distribution that is not installed cannot be imported from anywhere, the tree included."""
    found = {one.name for one in distributions if importlib.util.find_spec(one.package)}
    assert found == expected


def test_just_the_expected_hooks_are_announced(expected: set[str], distributions) -> None:
    """The entry points of the environment are those of the installed distributions, word for word."""
    promised = {key: value for one in distributions if one.name in expected for key, value in one.entry_points.items()}
    found = importlib.metadata.entry_points(group="nvalchemi.hooks")
    assert sorted((one.name, one.value) for one in found) == sorted(promised.items())


def test_what_is_tested_is_the_installed_wheel(expected: set[str], distributions) -> None:
    """The code under test lies in site-packages, not in the tree, so that it is the wheel that is tested."""
    site = Path(sysconfig.get_path("purelib"))
    for one in (one for one in distributions if one.name in expected):
        spec = importlib.util.find_spec(one.package)
        assert spec is not None
        assert spec.origin is not None
        assert Path(spec.origin).is_relative_to(site), f"{one.package} comes from {spec.origin}"


def test_nothing_is_editable(expected: set[str]) -> None:
    """No distribution is a link into the tree."""
    for name in expected:
        origin = json.loads(importlib.metadata.distribution(name).read_text("direct_url.json") or "{}")
        assert not origin.get("dir_info", {}).get("editable"), f"{name} is editable: {origin}"
