"""The arithmetic by itself, against the literal equation."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from nvalchemi_hooks_ema import kernels
from nvalchemi_hooks_ema.kernels import foreach, fused, reference, rounded, tensorwise


@pytest.mark.parametrize("kernel", [foreach, fused, tensorwise])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decay", [0.51, 0.9, 0.999])
def test_every_kernel_computes_the_equation(kernel, dtype, decay, tensors):
    """Whichever kernel runs, the average is decay * average + (1 - decay) * value to rounding, and values stay."""
    averages, values = tensors(dtype, 0), tensors(dtype, 1)
    expected = [reference.blend(a.double(), v.double(), decay) for a, v in zip(averages, values, strict=True)]
    kernel.blend_(averages, values, 1 - decay)
    for average, wanted in zip(averages, expected, strict=True):
        torch.testing.assert_close(average.double(), wanted, rtol=0, atol=4 * torch.finfo(dtype).eps)
    assert all(map(torch.equal, values, tensors(dtype, 1)))


@pytest.mark.parametrize("kernel", [fused, tensorwise])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernels_agree_bit_for_bit(kernel, dtype, tensors):
    """The fused and the one-by-one kernel have the bits of the multi-tensor one, over many updates."""
    mine, theirs = tensors(dtype, 0), tensors(dtype, 0)
    for step in range(50):
        values = tensors(dtype, step)
        kernel.blend_(mine, values, 0.001)
        foreach.blend_(theirs, values, 0.001)
    assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("kernel", [foreach, fused, tensorwise])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_accumulated_in_float32(kernel, dtype, tensors, blend_rounded_):
    """The accumulators follow the equation in float32, and the averages are the accumulators, rounded."""
    averages, values = tensors(dtype, 0), tensors(dtype, 1)
    accumulators = [average.float() for average in averages]
    expected = [reference.blend(a.double(), v.double(), 0.999) for a, v in zip(accumulators, values, strict=True)]
    blend_rounded_(kernel, accumulators, averages, values, 1 - 0.999)
    for accumulator, average, wanted in zip(accumulators, averages, expected, strict=True):
        torch.testing.assert_close(accumulator.double(), wanted, rtol=0, atol=1e-6)
        assert torch.equal(average, accumulator.to(dtype))


def test_the_room_for_widened_values_has_their_layout():
    """Whatever the strides of an accumulator, the values beside it are laid out in the same way, in shared memory."""
    plain, last = torch.zeros(3, 5), torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    gaps, scalar, nothing = torch.zeros(4, 6)[:, :3], torch.zeros(()), torch.zeros(0, 2)
    one, other = rounded.room_for([[plain, last, gaps], [scalar, nothing, plain.t()]])
    for room, like in zip(one + other, [plain, last, gaps, scalar, nothing, plain.t()], strict=True):
        assert room.shape == like.shape
        assert room.stride() == like.stride() or like is gaps
    for room in one:
        room.fill_(1.0)
    assert all((room == 1.0).all() for room in one)
    assert one[0].data_ptr() == other[0].data_ptr()


def test_the_fused_kernel_is_used_only_where_it_is_right():
    """It is taken for contiguous float32 and float64 with a decay above 0.5, and for nothing else."""
    square = torch.zeros(2, 2)
    assert kernels.describe("cpu", torch.float32, 0.999) == ("fused" if fused.agrees(torch.float32) else "foreach")
    assert kernels.describe("cpu", torch.float32, 0.5) == "foreach"
    assert kernels.describe("cpu", torch.complex64) == "foreach"
    assert kernels.describe("cuda") == kernels.describe(torch.device("cuda", 1)) == "foreach"
    assert kernels.describe("cuda", torch.float16) == "foreach, on float32 accumulators"
    assert kernels.describe("cpu", torch.float16) == kernels.describe() + ", on float32 accumulators"
    assert kernels.describe("cpu", torch.complex64, veto=True) == "foreach, chosen by bits"
    assert kernels.describe("cpu", veto=True) == ("fused" if fused.agrees(torch.float32) else "foreach, chosen by bits")
    assert not fused.takes(square.t(), torch.ones(2, 2).t(), 0.1)
    assert not fused.takes(square, square.double(), 0.1)


@pytest.mark.parametrize("broken", [None, lambda *args, **kwargs: None, "raises"])
def test_without_a_sound_fused_operation_the_multi_tensor_one_is_used(broken, monkeypatch):
    """A torch whose private operation is missing, changed or wrong costs speed, never a number."""

    def raises(*args: object, **kwargs: object) -> None:
        raise RuntimeError("another signature")

    fused.agrees.cache_clear()
    if broken is None:
        monkeypatch.delattr(torch, "_fused_sgd_")
    else:
        monkeypatch.setattr(torch, "_fused_sgd_", raises if broken == "raises" else broken)
    try:
        average = torch.zeros(3)
        for call in kernels.blending([(average, torch.ones(3))], 0.25):
            call()
        assert kernels.describe() == "foreach"
        assert average.tolist() == [0.25, 0.25, 0.25]
    finally:
        fused.agrees.cache_clear()


def test_mixed_lists_are_grouped():
    """Tensors of several dtypes and layouts are blended and copied in one go, each as it should be."""
    averages = [
        torch.zeros(2),
        torch.zeros(2, dtype=torch.float64),
        torch.zeros(2, 2).t(),
        nn.Parameter(torch.zeros(1)),
    ]
    values = [torch.full_like(average, 4.0, requires_grad=False) for average in averages]
    with torch.no_grad():
        for call in kernels.blending(zip(averages, values, strict=True), 0.25):
            call()
        assert all((average == 1.0).all() for average in averages)
        for call in kernels.copying(zip(averages, values, strict=True)):
            call()
    assert all(map(torch.equal, averages, values))


def test_trying_the_kernels_leaves_the_random_numbers_alone():
    """The self-test of the fused kernel does not touch the user's random state."""
    before = torch.random.get_rng_state()
    fused.agrees.cache_clear()
    fused.agrees(torch.float32)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_kernels_need_nothing_but_torch():
    """Importing the arithmetic imports neither the core nor pydantic."""
    code = "import sys, nvalchemi_hooks_ema.kernels; sys.exit('nvalchemi' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
