"""Test files of an author of hooks, run by a pytest of their own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest


@dataclass(frozen=True)
class Run:
    """What a pytest run came to."""

    code: int
    output: str
    outcomes: dict[str, dict[str, str]]  # test class -> test -> passed, failed or skipped

    def of(self, name: str, outcome: str) -> set[str]:
        """The tests of a class with an outcome."""
        return {test for test, came_to in self.outcomes[name].items() if came_to == outcome}


def run_in(folder: Path, file: Path, *arguments: str, path: tuple[Path, ...] = ()) -> Run:
    """Run pytest on a copy of a file in a folder; the path begins with other folders."""
    copied = Path(shutil.copy(file, folder))
    code = f"import sys; sys.path[:0] = {[str(folder), *map(str, path)]!r}; import pytest; sys.exit(pytest.main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "--junitxml=outcomes.xml", "-p", "no:cacheprovider", *arguments, copied.name],
        cwd=folder, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    outcomes: dict[str, dict[str, str]] = defaultdict(dict)
    for case in ElementTree.parse(folder / "outcomes.xml").iter("testcase"):
        kinds = {child.tag for child in case}
        came_to = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        outcomes[case.attrib["classname"].rpartition(".")[2]][case.attrib["name"]] = came_to
    return Run(done.returncode, done.stdout + done.stderr, dict(outcomes))


@pytest.fixture
def run_tests(tmp_path: Path) -> Callable[..., Run]:
    """Run pytest on a source."""

    def run(source: str, *arguments: str) -> Run:
        (tmp_path / "given").mkdir()
        file = tmp_path / "given" / "test_hook.py"
        file.write_text(source)
        return run_in(tmp_path, file, *arguments)

    return run


@pytest.fixture(scope="session")
def run_file() -> Callable[..., Run]:
    """Run pytest on a file, in a folder."""
    return run_in
