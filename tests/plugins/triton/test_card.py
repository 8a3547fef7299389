"""The card of the plugin."""

from __future__ import annotations

import doctest
from pathlib import Path

CARD = Path(__file__).parents[3] / "plugins" / "triton" / "README.md"


def test_the_examples_of_the_card_run(monkeypatch):
    """What the card shows is what happens, where Triton's interpreter is off as with a user."""
    monkeypatch.delenv("TRITON_INTERPRET")
    failed, tried = doctest.testfile(str(CARD), module_relative=False, encoding="utf-8")
    assert (failed, tried > 10) == (0, True)


def test_the_card_says_that_no_gpu_has_run_it():
    """Nobody takes the hook for tested."""
    assert "**Untested on a GPU.**" in CARD.read_text(encoding="utf-8")
