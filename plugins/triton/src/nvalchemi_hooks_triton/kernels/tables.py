"""What a launch over many tensors has to know, kept on the device: where the tensors lie, and who does which piece."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["CHUNK", "Tables", "addresses", "chunked"]

CHUNK = 4096  # elements a program updates: few enough to keep a GPU busy, so many that starting it costs little

_address: Callable[[Any], int] = Tensor.data_ptr


class Tables:
    """Small tensors of numbers on one device, written anew only when the numbers have changed.

    Addresses of weights and state stay what they are from step to step, those of gradients mostly do. They are compared
    by value, so that nothing can be stale: a weight that was moved, or a state that was loaded, is another number. An
    upload does not wait for the device.

    Parameters
    ----------
    device : torch.device
        Where the tables live.

    Examples
    --------
    >>> tables = Tables(torch.device("cpu"))
    >>> first = tables.integers("sizes", (3, 4))
    >>> first.tolist(), tables.integers("sizes", (3, 4)) is first, tables.integers("sizes", (3, 5)) is first
    ([3, 4], True, False)
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: dict[str, tuple[tuple[Any, ...], Tensor]] = {}
        self._captured: list[Tensor] = []

    def holds(self, name: str, numbers: tuple[Any, ...]) -> bool:
        """Return whether a table is there already, as it has to be while a CUDA graph is captured."""
        return name in self._kept and self._kept[name][0] == numbers

    def keep(self) -> None:
        """Keep all tables as they are now for good: a captured graph goes on reading them."""
        self._captured.extend(table for _, table in self._kept.values())

    def integers(self, name: str, numbers: tuple[int, ...]) -> Tensor:
        """Return a table of int64."""
        return self._table(name, numbers, torch.int64, numbers)

    def chunks(self, sizes: tuple[int, ...]) -> Tensor:
        """Return which chunk of which tensor each program does, int32, flat pairs."""
        return self._table("chunks", sizes, torch.int32, None)

    def log_betas(self, betas: tuple[float, float]) -> Tensor:
        """Return the natural logarithms of two coefficients: float64."""
        return self._table("betas", betas, torch.float64, [math.log(beta) if beta else -math.inf for beta in betas])

    def scratch(self, count: int) -> Tensor:
        """Return room for three float32 numbers a tensor."""
        name, key = "scratch", (count,)
        if not self.holds(name, key):
            self._kept[name] = key, torch.empty(3 * count, dtype=torch.float32, device=self.device)
        return self._kept[name][1]

    def _table(self, name: str, key: tuple[Any, ...], dtype: torch.dtype, numbers: Sequence[Any] | None) -> Tensor:
        if not self.holds(name, key):
            values = chunked(key) if numbers is None else numbers
            pinned = self.device.type == "cuda"
            host = torch.tensor(values, dtype=dtype, pin_memory=pinned)
            self._kept[name] = key, host.to(self.device, non_blocking=True) if pinned else host
        return self._kept[name][1]


def addresses(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return where tensors lie.

    Examples
    --------
    >>> tensor = torch.ones(3)
    >>> addresses([tensor[1:]])[0] - tensor.data_ptr()
    4
    """
    return tuple(map(_address, tensors))


def chunked(sizes: Sequence[int]) -> list[int]:
    """Return pairs of (which tensor, which of its chunks), flat: every element in one chunk.

    Examples
    --------
    >>> chunked([CHUNK + 1, 0, 7])
    [0, 0, 0, 1, 2, 0]
    """
    return [n for place, size in enumerate(sizes) for piece in range(-(-size // CHUNK)) for n in (place, piece)]
