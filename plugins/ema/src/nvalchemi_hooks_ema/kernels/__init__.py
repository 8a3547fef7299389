"""The arithmetic of the average, and the choice of the fastest way that has the same numbers.

============ ====================================================================================
kernel       for what
============ ====================================================================================
`reference`  the equation, for comparison
`fused`      float32 and float64, decay above 0.5: on a CPU, and on CUDA under a veto
`foreach`    every other tensor of torch, copies
`rounded`    bfloat16 and float16, around one of the others on float32 accumulators
`tensorwise` subclasses of tensors
============ ====================================================================================

A choice is made once, when the lists of tensors are known; it gives calls to be repeated every step. Their only
argument is the veto, if there is one on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from nvalchemi_hooks_ema.kernels import foreach, fused, rounded, tensorwise

__all__ = ["Call", "blending", "blending_rounded", "copying", "describe"]


class Call(NamedTuple):
    """An update of some lists of tensors on one device, prepared.

    Attributes
    ----------
    free : callable
        Does it.
    vetoed : callable
        Does it unless its keyword argument `veto`, on `device`, is 1.
    device : torch.device
        Where the tensors are.
    """

    free: Callable[[], None]
    vetoed: Callable[..., None]
    device: torch.device

    def __call__(self, veto: Tensor | None = None) -> None:
        """Do it, unless there is a veto."""
        if veto is None:
            self.free()
        else:
            self.vetoed(veto=veto.to(self.device))  # not without blocking: a CPU would read it too early


class _Choice(NamedTuple):
    """Which kernel runs without a veto, and which with one."""

    free: ModuleType
    vetoed: ModuleType


def blending(pairs: Iterable[tuple[Tensor, Tensor]], weight: float) -> list[Call]:
    """Return the calls that move averages towards their values.

    Parameters
    ----------
    pairs : iterable of (average, value)
        Pairwise of one shape, device and dtype; floating or complex.
    weight : float
        1 - decay.

    Examples
    --------
    >>> average = torch.tensor([1.0])
    >>> calls = blending([(average, torch.tensor([3.0]))], weight=0.5)
    >>> for call in calls:
    ...     call()
    ...     call(veto=torch.tensor(1.0))
    >>> average
    tensor([2.])
    """
    groups: dict[tuple[_Choice, torch.device, torch.dtype], list[tuple[Tensor, ...]]] = {}
    for average, value in pairs:
        choice = _choice(average, value, weight)
        groups.setdefault((choice, average.device, average.dtype), []).append((average, value))
    return [
        _call(device, *(partial(kernel.blend_, *_columns(rows), weight) for kernel in choice))
        for (choice, device, _), rows in groups.items()
    ]


def blending_rounded(triples: Iterable[tuple[Tensor, Tensor, Tensor]], weight: float) -> list[Call]:
    """Return the calls that average low-precision values in accumulators.

    Parameters
    ----------
    triples : iterable of (accumulator, average, value)
        Of one shape and device; the accumulator is float32, the others are of one dtype.
    weight : float
        1 - decay.
    """
    groups: dict[tuple[_Choice, torch.device, torch.dtype], list[rounded.Row]] = {}
    for accumulator, average, value in triples:
        choice = _choice(accumulator, accumulator, weight) if _is_plain(average, value) else _TENSORWISE
        groups.setdefault((choice, average.device, average.dtype), []).append((accumulator, average, value))
    calls: list[Call] = []
    for (choice, device, _), rows in groups.items():
        if choice == _TENSORWISE:
            accumulators, averages, values = _columns(rows)
            calls.append(_call(device, partial(tensorwise.blend_rounded_, accumulators, averages, values, weight)))
        else:
            calls.extend(_rounded_calls(choice, device, rows, weight))
    return calls


def copying(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[Call]:
    """Return the calls that copy values into averages.

    Parameters
    ----------
    pairs : iterable of (average, value)
        Pairwise of one shape; device and dtype may differ, but not under a veto.
    """
    groups: dict[tuple[object, ...], list[tuple[Tensor, ...]]] = {}
    for average, value in pairs:
        key = (_is_plain(average, value), average.device, average.dtype, value.device, value.dtype)
        groups.setdefault(key, []).append((average, value))
    return [
        _call(rows[0][0].device, partial((foreach if plain else tensorwise).copy_, *_columns(rows)))
        for (plain, *_), rows in groups.items()
    ]


def describe(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, decay: float = 0.999, *, veto: bool = False
) -> str:
    """Say which kernel averages contiguous weights on this machine.

    Parameters
    ----------
    device : torch.device or str
        Where the weights are.
    dtype : torch.dtype
        Their dtype.
    decay : float
        The decay of the average.
    veto : bool
        Whether the decision on the step is still on the device.

    Examples
    --------
    >>> describe("cuda")
    'foreach'
    >>> describe("cpu", decay=0.3, veto=True)
    'foreach, chosen by bits'
    """
    kind = torch.device(device).type
    low = dtype in (torch.float16, torch.bfloat16)
    usable = 1 - decay < fused.BRANCH_OF_LERP and fused.agrees(torch.float32 if low else dtype, kind)
    name = "fused" if usable and (veto or kind == "cpu") else "foreach, chosen by bits" if veto else "foreach"
    return f"{name}, on float32 accumulators" if low else name


_TENSORWISE = _Choice(tensorwise, tensorwise)


def _choice(average: Tensor, value: Tensor, weight: float) -> _Choice:
    if not _is_plain(average, value):
        return _TENSORWISE
    if not fused.takes(average, value, weight):
        return _Choice(foreach, foreach)
    return _Choice(fused if average.device.type == "cpu" else foreach, fused)


def _rounded_calls(choice: _Choice, device: torch.device, rows: Sequence[rounded.Row], weight: float) -> Iterable[Call]:
    chunks = [_columns(chunk) for chunk in rounded.in_chunks(rows)]
    rooms = rounded.room_for([accumulators for accumulators, _, _ in chunks])
    for (accumulators, averages, values), room in zip(chunks, rooms, strict=True):
        lists = (accumulators, averages, values, room)
        yield _call(device, *(partial(rounded.blend_, kernel.blend_, *lists, weight) for kernel in choice))


def _call(device: torch.device, free: Callable[..., None], vetoed: Callable[..., None] | None = None) -> Call:
    return Call(free, vetoed or free, device)


def _is_plain(*tensors: Tensor) -> bool:
    """Whether multi-tensor operations know such tensors, and their memory is what they show."""
    return all(
        type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and not (tensor.is_conj() or tensor.is_neg())
        for tensor in tensors
    )


def _columns(rows: Sequence[tuple[Tensor, ...]]) -> list[list[Tensor]]:
    return [list(column) for column in zip(*rows, strict=True)]
