"""The page on testing hooks: its file passes the kit, its examples run, and nothing of the kit is left out."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nvalchemi.testing
from nvalchemi.testing import FakeSite, HookConformance

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "testing-hooks.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
HOOKS = re.findall(r"```python\n(.*?)```", (DOCS / "writing-hooks.md").read_text(encoding="utf-8"), re.DOTALL)
CHECKS = {name: getattr(HookConformance, name) for name in dir(HookConformance) if name.startswith("test_")}
METADATA = {"Summary": "Noise.", "License-Expression": "MIT", "Requires-Python": ">=3.11", "Description": "A card."}


def _classes(*names):
    """Return the imports of the page on writing hooks, and these of its classes."""
    nodes = [node for program in HOOKS for node in ast.parse(program).body]
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) and "acme" not in ast.dump(node)]
    kept = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name in names]
    return "".join(f"{ast.unparse(node)}\n" for node in [*imports, *kept])


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """What pytest prints for the programs of the page, with the hooks of the page on writing hooks installed."""
    site, folder = FakeSite(tmp_path_factory.mktemp("site")), tmp_path_factory.mktemp("tests")
    site.refreshes = False
    offer = next(program for program in HOOKS if "@hookimpl" in program)
    site.add(
        "acme-hooks",
        hooks={"grad_noise": "acme_hooks.plugin"},
        modules={
            "acme_hooks.noise": _classes("GradNoiseHook", "CSVLogger"),
            "acme_hooks.plugin": f"from nvalchemi.hooks import HookOffer, hookimpl\n{offer}",
        },
        requires=["nvalchemi-hooks>=0.1,<0.2"],
        headers=METADATA,
    )
    conformance, log, *others = PROGRAMS
    (folder / "conftest.py").write_text("from nvalchemi.testing import fake_site  # noqa: F401\n")
    (folder / "test_conformance.py").write_text(conformance)
    (folder / "test_log.py").write_text(
        "from acme_hooks.noise import CSVLogger\nfrom nvalchemi.testing import HookConformance\n" + log
    )
    (folder / "test_doubles.py").write_text("from acme_hooks.noise import GradNoiseHook\n" + "\n".join(others))
    path = os.pathsep.join(filter(None, [str(site.path), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA"],
        cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_file_of_the_page_passes_the_kit_and_prints_what_is_shown(output):
    """The hook of the page on writing hooks passes, and the line of the report is the one on the page."""
    [shown] = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert shown.strip() in output


def test_a_plain_hook_that_writes_a_file_passes_the_kit(output):
    """The logger of the page on writing hooks is checked in a folder of its own."""
    assert re.search(r"test_log.py::TestLog: \d\d checks run", output)


@pytest.mark.parametrize("name", re.findall(r"^def (test_\w+)", "\n".join(PROGRAMS), re.MULTILINE))
def test_an_example_of_the_page_passes(output, name):
    """Each test that the page shows passes as it stands."""
    assert f"PASSED test_doubles.py::{name}" in output


def test_every_check_stands_on_the_page_with_its_sentence():
    """The table is the list of checks, word for word."""
    rows = dict(re.findall(r"^\| `(test_\w+)` \| (.*) \|$", PAGE, re.MULTILINE))
    assert rows == {name: check.__doc__ for name, check in CHECKS.items()}


def test_every_switch_stands_on_the_page_with_its_default():
    """The attributes of the kit and their defaults are those of the table."""
    switches = {}
    for cells in re.findall(r"^\| (`[^|]*) \| ([^|]*) \|", PAGE, re.MULTILINE):
        names, defaults = (re.findall(r"`([^`]*)`|(none)", cell) for cell in cells)
        defaults = [one or "None" for one, _ in defaults]
        switches |= dict(zip((name for name, _ in names), defaults * (1 + len(names) - len(defaults)), strict=False))
    declared = {
        name: getattr(HookConformance, name)
        for base in HookConformance.__mro__
        for name in getattr(base, "__annotations__", {})
        if hasattr(HookConformance, name) and not name.startswith("_")
    }
    assert {name: repr(value) for name, value in declared.items()} == {name: switches[name] for name in declared}
    assert len(declared) > 10


def test_every_public_name_stands_on_the_page():
    """No double, fixture or class is left out."""
    assert [name for name in nvalchemi.testing.__all__ if f"`{name}" not in PAGE and name not in PROGRAMS[0]] == []
