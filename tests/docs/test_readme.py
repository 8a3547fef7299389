"""The README tells the truth."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from nvalchemi.hooks import list_hooks

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _block(language):
    found = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found is not None, f"the README has no {language} block"
    return found[1]


def test_the_program_prints_what_stands_below_it(tmp_path):
    """The README's program has at most 35 lines, runs as it stands, and prints just what the README says."""
    program = _block("python")
    assert len(program.splitlines()) <= 35
    script = tmp_path / "program.py"
    script.write_text(program, encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == _block("text")


def test_the_table_of_plugins_names_every_official_hook():
    """Each hook that is installed with the core's extras stands in the table, with its own extra."""
    rows = dict(re.findall(r"^\| \[`(\w+)`\].*?`nvalchemi-hooks\[([\w-]+)\]`", README, re.MULTILINE))
    assert rows == {hook.name: hook.distribution.removeprefix("nvalchemi-hooks-") for hook in list_hooks()}


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_links_lead_somewhere(path):
    """Every relative link in the README leads to a file."""
    assert (ROOT / path).exists()
