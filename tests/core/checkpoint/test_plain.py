"""Plain data: what is allowed is exactly what torch loads safely, and offenders are named by their place."""

from __future__ import annotations

import enum
import io
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from nvalchemi.errors import NotPlainDataError
from nvalchemi.training.plain import check_plain, host_copy, on_host


class Colour(enum.IntEnum):
    RED = 1


class Subclass(torch.Tensor):
    pass


PLAIN = [
    None, True, 1, 1.5, 2j, "text", b"bytes", torch.zeros(2), nn.Parameter(torch.ones(1)), torch.float16,
    torch.device("cpu"), torch.Size([2]), [1, [2]], (1, "a"), {1, 2}, {"a": {"b": (1,)}}, OrderedDict(a=1),
    Counter("aab"), torch.eye(2).to_sparse(),
]  # fmt: skip
OFFENDERS = [
    (numpy.float64(1.0), r"state\['a'\]\[1\] is a float64 .*use .item\(\)"),
    (numpy.ones(2), r"state\['a'\]\[1\] is a ndarray .*torch.from_numpy"),
    (Colour.RED, r"state\['a'\]\[1\] is a Colour .*an enum member as its value"),
    (defaultdict(int), r"state\['a'\]\[1\] is a defaultdict .*use dict\("),
    (Path("x"), r"state\['a'\]\[1\] is a PosixPath .*a path as str\(path\)"),
    (Subclass([1.0]), r"state\['a'\]\[1\] is a Subclass .*instead of a subclass"),
    ({"b": [len]}, r"state\['a'\]\[1\]\['b'\]\[0\] is a builtin_function_or_method"),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_data_is_what_torch_loads_safely(value):
    """Everything that is allowed comes back from a file that is loaded with weights_only=True."""
    check_plain({"a": [value]}, "state")
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded) is type(value)


@pytest.mark.parametrize(("value", "message"), OFFENDERS, ids=lambda value: type(value).__name__)
def test_offenders_are_named_by_their_place(value, message):
    """What could not be loaded safely is a TypeError with its place, its type and the remedy."""
    with pytest.raises(NotPlainDataError, match=message) as caught:
        check_plain({"a": [1, value]}, "state")
    assert isinstance(caught.value, TypeError)


def test_a_key_can_offend_too():
    """Keys are data like the rest."""
    with pytest.raises(NotPlainDataError, match=r"the key .*RED.* of state is a Colour"):
        check_plain({Colour.RED: 1}, "state")


def test_a_copy_shares_nothing_with_the_original_and_keeps_ties():
    """Tensors are copied once each: those that shared memory share it in the copy, and only there."""
    weight = torch.zeros(2, 2)
    copy = host_copy({"a": weight, "b": [weight.detach()], "row": weight[0]})
    weight.add_(1)
    assert copy["a"].sum() == 0
    assert copy["a"] is copy["b"][0]
    assert copy["row"].untyped_storage().nbytes() == 8  # not the whole storage that it is a view of


def test_copies_of_tensors_that_are_made_anew_are_not_mixed_up():
    """Tensors that nobody else keeps may get each other's memory one after the other: each has its own copy."""
    copied = {}
    copies = [host_copy(torch.full((1000,), float(number)), copied=copied) for number in range(20)]
    assert [float(copy[0]) for copy in copies] == list(range(20))


def test_a_copy_keeps_strides():
    """A channels-last tensor stays one."""
    image = torch.zeros(1, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert host_copy(image).stride() == image.stride()


def test_what_is_on_the_host_stays_the_very_same():
    """Moving to the host copies nothing that is there."""
    tensor = torch.zeros(2)
    assert on_host({"a": [tensor]})["a"][0].data_ptr() == tensor.data_ptr()
