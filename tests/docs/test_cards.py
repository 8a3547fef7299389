"""The card of every plugin has the same sections, and its programs run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CARDS = sorted((ROOT / "plugins").glob("*/README.md"))
STRANGERS = ROOT / "docs" / "examples" / "third-party-hook" / "README.md"  # its program runs where it is installed
SECTIONS = [
    "What it does",
    "How to use it",
    "What it does at which stage",
    "Cost",
    "Do not combine with",
    "References",
]


@pytest.mark.parametrize("card", [*CARDS, STRANGERS], ids=lambda card: card.parent.name)
def test_every_card_has_the_same_sections(card):
    """A reader finds the same headings on every card, in the same order."""
    assert re.findall(r"^## (.*)$", card.read_text(encoding="utf-8"), re.MULTILINE) == SECTIONS


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.parent.name)
def test_the_programs_of_a_card_run(card, tmp_path):
    """The Python blocks of a card run, one after the other, as they stand."""
    blocks = re.findall(r"^```python\n(.*?)^```", card.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert blocks
    script = tmp_path / "card.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    runner = ["-m", "doctest", card] if blocks[0].startswith(">>>") else [script]  # with its output, or without
    done = subprocess.run([sys.executable, *runner], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
