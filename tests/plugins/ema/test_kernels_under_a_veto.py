"""The arithmetic when the decision on the step is still on the device."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nvalchemi_hooks_ema import kernels
from nvalchemi_hooks_ema.kernels import foreach, fused, reference, tensorwise

GO, STOP = torch.tensor(0.0), torch.tensor(1.0)
ODD = [torch.inf, -torch.inf, torch.nan, -0.0, 0.0, 1e-45, 3e38]
numbers = st.lists(st.one_of(st.sampled_from(ODD), st.floats(width=32)), min_size=1, max_size=20)


def bits(*lists: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of the memory, comparable where there are nans."""
    return [tensor.detach().clone().contiguous().reshape(-1).view(torch.uint8) for one in lists for tensor in one]


def same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@settings(deadline=None, max_examples=60)
@given(numbers, numbers, st.sampled_from([foreach, fused, tensorwise]), st.floats(0.0001, 0.4999), st.booleans())
def test_a_veto_is_all_or_nothing(old, new, kernel, weight, vetoed):
    """With a veto of 1 no bit of an average changes, with 0 it gets the bits of a blend without one, inf or not."""
    size = min(len(old), len(new))
    averages, values = [torch.tensor(old[:size])], [torch.tensor(new[:size])]
    wanted = [average.clone() for average in averages]
    if not vetoed:
        kernel.blend_(wanted, values, weight)
    kept = bits(values)
    kernel.blend_(averages, values, weight, STOP if vetoed else GO)
    assert same_bits(bits(averages), bits(wanted))
    assert same_bits(bits(values), kept)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.lists(st.floats(-10, 10), min_size=3, max_size=3), st.booleans()), min_size=1, max_size=8),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]),
    st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.999]),
)
def test_the_average_is_that_of_the_steps_that_were_not_vetoed(history, dtype, decay):
    """Whatever the dtype, the decay and the vetoes, the average follows the equation over the executed steps alone."""
    low = dtype in (torch.bfloat16, torch.float16)
    average, value = torch.zeros(3, dtype=dtype), torch.zeros(3, dtype=dtype)
    accumulator = torch.zeros(3)
    calls = (
        kernels.blending_rounded([(accumulator, average, value)], 1 - decay)
        if low
        else kernels.blending([(average, value)], 1 - decay)
    )
    exact = torch.complex128 if dtype.is_complex else torch.float64
    expected = torch.zeros(3, dtype=exact)
    for numbers_, vetoed in history:
        value.copy_(torch.tensor(numbers_))
        if vetoed:
            value[0] = torch.inf
        else:
            expected = reference.blend(expected, value.to(exact), decay)
        for call in calls:
            call(veto=STOP if vetoed else GO)
    precise = accumulator if low else average
    torch.testing.assert_close(precise.to(exact), expected, rtol=0, atol=1e-4 if exact != precise.dtype else 1e-12)
    assert not low or torch.equal(average, accumulator.to(dtype))


@pytest.mark.parametrize("kernel", [foreach, fused, tensorwise])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_keeps_every_bit_under_a_veto(kernel, dtype, tensors, blend_rounded_):
    """Accumulators and averages stay as they are, with values of inf and nan, and move as ever without a veto."""
    averages, values = tensors(dtype, 0), tensors(dtype, 1)
    averages[1][0] = torch.inf
    accumulators = [average.float() for average in averages]
    expected = [average.clone() for average in averages], [accumulator.clone() for accumulator in accumulators]
    before = bits(averages, accumulators)
    broken = [torch.full_like(value, torch.nan) for value in values]
    blend_rounded_(kernel, accumulators, averages, broken, 0.001, STOP)
    assert same_bits(bits(averages, accumulators), before)
    blend_rounded_(kernel, accumulators, averages, values, 0.001, GO)
    blend_rounded_(kernel, expected[1], expected[0], values, 0.001)
    assert same_bits(bits(averages, accumulators), bits(*expected))


@pytest.mark.parametrize("kernel", [foreach, tensorwise])
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32, torch.float64, torch.complex128]
)
def test_copies_keep_to_a_veto(kernel, dtype):
    """Buffers of any dtype, contiguous or not, are copied with a veto of 0 and stay as they are with 1."""
    averages = [torch.zeros(3, dtype=dtype), torch.zeros(2, 3, dtype=dtype).t(), torch.zeros((), dtype=dtype)]
    values = [torch.ones_like(average) for average in averages]
    kernel.copy_(averages, values, STOP)
    assert not any(average.any() for average in averages)
    kernel.copy_(averages, values, GO)
    assert all(map(torch.equal, averages, values))


def test_every_group_of_a_mixed_list_keeps_to_a_veto():
    """Dtypes, layouts and subclasses of tensors, each group in its own kernel: none moves, then all do."""

    class Own(torch.Tensor):
        """A subclass that multi-tensor operations need not know."""

    averages = [
        torch.zeros(2),
        torch.zeros(2, dtype=torch.float64),
        torch.zeros(2, 2).t(),
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(2).as_subclass(Own),
        nn.Parameter(torch.zeros(1)),
    ]
    values = [torch.full_like(average, 4.0, requires_grad=False) for average in averages]
    calls = kernels.blending(zip(averages, values, strict=True), 0.25)
    assert len(calls) == 5
    with torch.no_grad():
        for veto, wanted in ((STOP, 0.0), (GO, 1.0)):
            for call in calls:
                call(veto=veto)
            assert all((average == wanted).all() for average in averages)


@pytest.mark.parametrize("broken", ["ignores the veto", "is missing"])
def test_without_a_sound_fused_operation_bits_are_chosen(broken, monkeypatch):
    """A torch whose private operation is missing, or does not keep to a veto, costs speed, never a number."""
    fused.agrees.cache_clear()
    if broken == "is missing":
        monkeypatch.delattr(torch, "_fused_sgd_")
    else:
        original = torch._fused_sgd_

        @functools.wraps(original)
        def heedless(*args, found_inf=None, **kwargs):
            return original(*args, **kwargs)

        monkeypatch.setattr(torch, "_fused_sgd_", heedless)
    try:
        assert kernels.describe(veto=True) == "foreach, chosen by bits"
        average = torch.zeros(3)
        for veto in (STOP, GO):
            for call in kernels.blending([(average, torch.ones(3))], 0.25):
                call(veto=veto)
        assert average.tolist() == [0.25, 0.25, 0.25]
    finally:
        fused.agrees.cache_clear()


def test_a_multi_tensor_lerp_refuses_a_wide_average_of_narrow_weights():
    """What the room for widened values is there for: float32 averages and bfloat16 weights do not blend directly."""
    with pytest.raises(RuntimeError, match="dtype"):
        torch._foreach_lerp_([torch.zeros(2)], [torch.ones(2, dtype=torch.bfloat16)], 0.001)
