"""The table of naive mistakes has no gap, and the page shows it as it is."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

TABLE = runpy.run_path(str(Path(__file__).with_name("table.py")))
LAWS, MISTAKES = TABLE["laws"](), TABLE["mistakes"]()


@pytest.mark.parametrize("entry", range(1, 46))
def test_every_fault_has_a_test_that_catches_a_naive_way(entry):
    """Each of the 45 faults has a law, and a naive way that breaks it."""
    assert [law for law in LAWS if law.entry == entry and law.naive]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_naive_way_is_caught_by_a_test(mistake):
    """No naive way stands there without a test that catches it, and each says what goes wrong."""
    assert [law for law in LAWS if law.naive == mistake]
    assert MISTAKES[mistake].endswith(".")


def test_every_law_says_what_holds_and_what_it_shows():
    """A test says in one sentence what holds; one that catches a naive way says what its failure shows."""
    for law in LAWS:
        assert law.holds.endswith("."), law.test
        assert bool(law.shows) is bool(law.naive), law.test
        assert law.naive is None or law.naive in MISTAKES, law.test


def test_the_page_shows_the_tests_as_they_are():
    """The tables of the page are those that the tests make; ``python tests/known_faults/table.py`` writes them."""
    page = TABLE["PAGE"].read_text(encoding="utf-8")
    assert page == TABLE["written"](page)
    assert [int(n) for n in dict.fromkeys(re.findall(r"^\* - (\d+)$", page, flags=re.M))] == list(range(1, 46))
