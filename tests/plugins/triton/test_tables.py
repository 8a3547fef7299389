"""The tables that tell a launch where everything is."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvalchemi_hooks_triton.kernels import Tables
from nvalchemi_hooks_triton.kernels.tables import CHUNK, chunked


@given(st.lists(st.integers(0, 3 * CHUNK + 1), max_size=5))
def test_every_element_is_in_one_chunk(sizes):
    """The chunks of a tensor lie side by side and end with it; an empty tensor has none."""
    numbers = chunked(sizes)
    pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
    assert pairs == [(place, piece) for place, size in enumerate(sizes) for piece in range((size + CHUNK - 1) // CHUNK)]


@pytest.mark.parametrize("captured", [False, True])
def test_a_captured_table_is_kept(captured):
    """A graph goes on reading the tables it was captured with, so these are not given back; others are."""
    tables = Tables(torch.device("cpu"))
    table = weakref.ref(tables.integers("sizes", (1, 2)))
    if captured:
        tables.keep()
    tables.integers("sizes", (3, 4))
    gc.collect()
    assert (table() is not None) == captured
