"""The card of the plugin."""

from __future__ import annotations

import doctest
from pathlib import Path

CARD = Path(__file__).parents[3] / "plugins" / "ema" / "README.md"


def test_the_examples_of_the_card_run():
    """What the card shows is what happens."""
    failed, tried = doctest.testfile(str(CARD), module_relative=False, encoding="utf-8")
    assert (failed, tried > 10) == (0, True)
