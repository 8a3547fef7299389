"""The figures of the page on scaling are those that its script computes, and its counts are those of a real run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def scaling():
    path = ROOT / "tests" / "benchmarks" / "scaling.py"
    spec = importlib.util.spec_from_file_location("scaling", path)
    module = sys.modules["scaling"] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules["scaling"]


@pytest.mark.parametrize("table", ["costs", "limits"])
def test_the_page_shows_what_the_script_computes(scaling, table):
    """Both tables stand on the page as the script prints them."""
    page = (ROOT / "docs" / "explanation" / "scaling.md").read_text(encoding="utf-8")
    assert getattr(scaling, table)(scaling.Machine(), scaling.Model()) in page


def test_the_simulation_agrees_with_its_limits(scaling):
    """With a link that costs nothing a step is its computing; with a processor that does, it is what is sent."""
    model = scaling.Model()
    free = scaling.Machine(inside=1e30, between=1e30, latency=0.0, memory=1e30)
    seconds, busy = scaling.step_seconds(free, model, 64)
    assert seconds == pytest.approx(busy)
    quick = scaling.Machine(compute=1e30, latency=0.0, memory=1e30)
    sent = scaling.wire_bytes(model, 64, sharded=True) / quick.between
    assert scaling.step_seconds(quick, model, 64)[0] == pytest.approx(sent)


def test_a_real_step_has_as_many_collectives(scaling, two):
    """A step of FSDP2 on two ranks with an average has the collectives of the formula, and without it no fewer."""
    for found in two["counted"]:
        assert found["with"] == found["without"]
        assert found["with"] == scaling.collectives(found["groups"], sharded=True)


def test_a_real_header_is_as_long(scaling, two, folder):
    """A piece in the header of a rank's file takes about as many bytes as the page reckons with."""
    file = next((folder / "run").glob("data-*/0.shards.safetensors"))
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    pieces = content[8 : 8 + length].count(b'"dtype"')
    assert 0.5 < length / pieces / 230 < 1.5
