"""The arithmetic of the average, and the choice of the fastest way that has the same numbers.

============ ====================================================================================
kernel       for what
============ ====================================================================================
`reference`  the equation, for comparison
`fused`      float32 and float64 on a CPU, decay above 0.5
`foreach`    every other tensor of torch, low precision with accumulators, copies
`tensorwise` subclasses of tensors
============ ====================================================================================

A choice is made once, when the lists of tensors are known; it gives calls without arguments, to be repeated every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from nvalchemi_hooks_ema.kernels import foreach, fused, tensorwise

__all__ = ["blending", "blending_rounded", "copying", "describe"]

_CHUNK = 2**22  # elements that are widened at a time: 16 MiB


def blending(pairs: Iterable[tuple[Tensor, Tensor]], weight: float) -> list[Callable[[], None]]:
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
    >>> average
    tensor([2.])
    """
    groups: dict[tuple[ModuleType, torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for average, value in pairs:
        key = (_blend_kernel(average, value, weight), average.device, average.dtype)
        groups.setdefault(key, []).append((average, value))
    return [partial(kernel.blend_, *_columns(rows), weight) for (kernel, _, _), rows in groups.items()]


def blending_rounded(triples: Iterable[tuple[Tensor, Tensor, Tensor]], weight: float) -> list[Callable[[], None]]:
    """Return the calls that average low-precision values in accumulators.

    Parameters
    ----------
    triples : iterable of (accumulator, average, value)
        Of one shape and device; the accumulator is float32, the others are of one dtype.
    weight : float
        1 - decay.
    """
    groups: dict[tuple[ModuleType, torch.device, torch.dtype], list[tuple[Tensor, Tensor, Tensor]]] = {}
    for accumulator, average, value in triples:
        kernel = foreach if _is_plain(average, value) else tensorwise
        groups.setdefault((kernel, average.device, average.dtype), []).append((accumulator, average, value))
    return [
        partial(kernel.blend_rounded_, *_columns(chunk), weight)
        for (kernel, _, _), rows in groups.items()
        for chunk in _chunks(rows)
    ]


def copying(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[Callable[[], None]]:
    """Return the calls that copy values into averages.

    Parameters
    ----------
    pairs : iterable of (average, value)
        Pairwise of one shape; device and dtype may differ.
    """
    groups: dict[tuple[object, ...], list[tuple[Tensor, Tensor]]] = {}
    for average, value in pairs:
        key = (_is_plain(average, value), average.device, average.dtype, value.device, value.dtype)
        groups.setdefault(key, []).append((average, value))
    return [partial((foreach if plain else tensorwise).copy_, *_columns(rows)) for (plain, *_), rows in groups.items()]


def describe(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, decay: float = 0.999) -> str:
    """Say which kernel averages contiguous weights.

    Parameters
    ----------
    device : torch.device or str
        Where the weights are.
    dtype : torch.dtype
        Their dtype.
    decay : float
        The decay of the average.

    Examples
    --------
    >>> describe("cpu", torch.bfloat16)
    'foreach, with float32 accumulators'
    >>> describe("cuda")
    'foreach'
    """
    if dtype in (torch.float16, torch.bfloat16):
        return "foreach, with float32 accumulators"
    if torch.device(device).type != "cpu":
        return "foreach"
    sample = torch.zeros(1, dtype=dtype)
    return "fused" if fused.takes(sample, sample, 1 - decay) else "foreach"


def _blend_kernel(average: Tensor, value: Tensor, weight: float) -> ModuleType:
    if not _is_plain(average, value):
        return tensorwise
    return fused if fused.takes(average, value, weight) else foreach


def _is_plain(*tensors: Tensor) -> bool:
    return all(type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer) for tensor in tensors)


def _columns(rows: Sequence[tuple[Tensor, ...]]) -> list[list[Tensor]]:
    return [list(column) for column in zip(*rows, strict=True)]


def _chunks(rows: Sequence[tuple[Tensor, ...]]) -> Iterator[list[tuple[Tensor, ...]]]:
    """Cut rows so that few elements are widened at a time; a larger tensor stands alone."""
    chunk: list[tuple[Tensor, ...]] = []
    elements = 0
    for row in rows:
        elements += row[0].numel()
        if chunk and elements > _CHUNK:
            yield chunk
            chunk, elements = [], row[0].numel()
        chunk.append(row)
    if chunk:
        yield chunk
