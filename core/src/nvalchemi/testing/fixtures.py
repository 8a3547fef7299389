"""Fixtures for pytest; import those that you use into your ``conftest.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nvalchemi.testing.needed import pytest
from nvalchemi.testing.site import FakeSite

__all__ = ["fake_site"]


@pytest.fixture
def fake_site(tmp_path: Path) -> Iterator[FakeSite]:
    """Give an environment that holds the distributions that the test puts into it, and no other.

    Yields
    ------
    FakeSite
        Empty at first.
    """
    site = FakeSite(tmp_path / "site")
    with site.isolated():
        yield site
