"""The fast arithmetic equals the literal one."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi_hooks_grad_clip.kernels import (
    clamp_,
    clip_divisor,
    first_nonfinite,
    largest_divisor,
    largest_usable,
    reference,
)

numbers = st.floats(min_value=-1e6, max_value=1e6, width=32)
anything = st.floats(width=32)
orders = st.sampled_from([0.5, 1.0, 2.0, 3.0, math.inf])


def lists_of(elements):
    return st.lists(st.lists(elements, max_size=4), min_size=1, max_size=4)


@settings(max_examples=80, deadline=None)
@given(values=lists_of(numbers), max_norm=st.floats(1e-3, 1e7), norm_type=orders, clip_value=st.floats(1e-3, 1e7))
def test_dividing_and_cutting_equals_the_equation(values, max_norm, norm_type, clip_value):
    """Division by the divisor and clamping give what the literal reference gives."""
    tensors = [torch.tensor(row, dtype=torch.float64) for row in values]
    expected, vetoed = reference.clip(tensors, max_norm, norm_type, clip_value)
    norm = torch.tensor(reference.vector_norm(tensors, norm_type), dtype=torch.float64)
    divisor = clip_divisor(norm, max_norm)
    assert divisor <= largest_divisor(torch.float64, max_norm, norm_type)
    for tensor in tensors:
        tensor.div_(divisor)
    clamp_(tensors, clip_value, unless=torch.tensor(False))
    assert (norm.item() <= largest_usable(torch.float64, max_norm, norm_type)) is not vetoed
    assert not vetoed
    torch.testing.assert_close(tensors, expected, rtol=1e-12, atol=0.0)


@settings(max_examples=80, deadline=None)
@given(values=lists_of(anything), norm_type=orders)
def test_what_cannot_be_used_is_told_and_left_alone(values, norm_type):
    """On any float32 values limit and reference agree, and unusable gradients keep every bit."""
    tensors = [torch.tensor(row) for row in values]
    before = [tensor.clone() for tensor in tensors]
    _, vetoed = reference.clip(tensors, 1.0, norm_type)
    norm = torch.tensor(reference.vector_norm(tensors, norm_type), dtype=torch.float32)
    divisor = clip_divisor(norm, 1.0)
    assert norm.le(largest_usable(torch.float32, 1.0, norm_type)).item() is not vetoed
    assert divisor.isfinite() == norm.isfinite()
    if vetoed:
        clamp_(tensors, 0.5, unless=torch.tensor(True))
        torch.testing.assert_close(tensors, before, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=80, deadline=None)
@given(values=lists_of(anything))
def test_the_first_that_is_not_finite(values):
    """The place of the culprit is that of the literal search."""
    tensors = [torch.tensor(row) for row in values]
    assert first_nonfinite(tensors) == reference.first_nonfinite(tensors)


def test_large_elements_are_finite_in_every_dtype():
    """The largest number of a dtype is no culprit, an inf or a nan behind it is."""
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    largest = [torch.full((3,), torch.finfo(dtype).max, dtype=dtype) for dtype in dtypes]
    sparse = torch.sparse_coo_tensor([[1]], [math.nan], (4,), check_invariants=True)
    assert first_nonfinite([*largest, torch.empty(0)]) is None
    assert first_nonfinite([*largest, torch.tensor([0.0, complex(0, math.inf)])]) == 4
    assert first_nonfinite([*largest, sparse]) == 4
    assert first_nonfinite([]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sum_of_squares_overflows_above_the_root_of_the_largest_number(dtype):
    """The limit is the root of the largest number of the norm's dtype, or that number itself for a maximum."""
    root = math.sqrt(torch.finfo(dtype).max)
    assert root * 0.999 < largest_usable(dtype, 1.0) < root * 1.001
    assert largest_usable(dtype, 1.0, math.inf) == torch.finfo(dtype).max


def test_the_divisor_keeps_the_precision_of_the_norm():
    """A double norm gives a double divisor."""
    divisor = clip_divisor(torch.tensor(0.1, dtype=torch.float64), 1e-3)
    assert divisor.dtype == torch.float64
    assert divisor.item() == pytest.approx((0.1 + 1e-6) / 1e-3, rel=1e-15)


def test_the_limit_is_exact_in_doubles_and_no_trouble_in_halves():
    """Doubles are cut to the double limit; a limit that fp16 cannot hold cuts nothing."""
    double, half = torch.ones(1, dtype=torch.float64), torch.full((1,), 60000.0, dtype=torch.float16)
    clamp_([double], 0.1, unless=torch.tensor(False))
    clamp_([half], 1e6, unless=torch.tensor(False))
    assert (double.item(), half.item()) == (0.1, 60000.0)


def test_kernels_know_no_hooks():
    """The kernels' own modules import torch and nothing of ours."""
    for name in ("foreach", "reference"):
        module = sys.modules[f"nvalchemi_hooks_grad_clip.kernels.{name}"]
        homes = {
            getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in vars(module).values()
        }
        assert not any(str(home).startswith("nvalchemi.") for home in homes)
