"""The page on powers leaves none out: attributes of update hooks, what a context is asked, and protocols."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nvalchemi.hooks import protocols
from nvalchemi.hooks.update_powers import UpdatePowers
from nvalchemi.training.hooks import TrainingUpdateHook

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "powers.md").read_text(encoding="utf-8")
SAID = [
    name for name, value in vars(TrainingUpdateHook).items() if name[0] != "_" and isinstance(value, str | int | None)
]
ASKED = [name for name in vars(UpdatePowers) if name[0] != "_"]


@pytest.mark.parametrize("name", [*SAID, *ASKED, *protocols.__all__])
def test_every_power_stands_on_the_page(name):
    """It stands there as code, where an author looks for what a hook may do."""
    assert f"`{name}`" in PAGE


def test_the_page_names_no_attribute_that_is_not_there():
    """The first table has just the attributes of the class."""
    table = PAGE.split("## ")[1]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, flags=re.M)) == sorted(SAID)
