"""The card says what is there, and its programs run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nvalchemi_hooks_loss_scaling.settings import ScalingSettings

CARD = (Path(__file__).parents[3] / "plugins" / "loss-scaling" / "README.md").read_text()
HEADINGS = [
    "What it does",
    "How to use it",
    "What it does at which stage",
    "Cost",
    "Do not combine with",
    "References",
]


def test_the_card_has_the_fixed_headings():
    """Every card has the same sections in the same order."""
    assert re.findall(r"^## (.+)$", CARD, re.MULTILINE) == HEADINGS


@pytest.mark.parametrize("program", re.findall(r"```python\n(.*?)```", CARD, re.DOTALL))
def test_the_programs_of_the_card_run(program):
    """Each program on the card runs as it is printed."""
    exec(compile(program, "README.md", "exec"), {})


def test_the_card_names_every_setting_with_its_default():
    """The table of settings holds each one, with the default of the code."""
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", CARD, re.MULTILINE))
    settings = ScalingSettings()
    assert set(rows) == set(ScalingSettings.__slots__)
    assert {name: eval(default.strip("`")) for name, default in rows.items()} == {n: getattr(settings, n) for n in rows}
