"""Whether the step is taken: vetoes that the host knows, vetoes that are still on the device, one read for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Decision", "Reading", "Veto", "read_together"]


class Veto(NamedTuple):
    """Who asked that no optimizer steps, and why."""

    hook: str
    reason: str


class Reading:
    """A number on the device that is read together with others."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        self._value = 0.0

    @property
    def value(self) -> float:
        """The number; asked before the common read, it is read alone and waits for the device."""
        if self._tensor is not None:
            self._take(read_together([self._tensor])[0])
        return self._value

    def _take(self, value: float) -> None:
        self._value, self._tensor = value, None


class _Deferred(NamedTuple):
    veto: Veto
    flag: Tensor
    found_inf: bool


class Decision:
    """The vetoes of one window."""

    def __init__(self) -> None:
        self.vetoes: list[Veto] = []
        self.found_inf = False
        self._deferred: list[_Deferred] = []
        self._readings: list[Reading] = []

    def defer(self, veto: Veto, flag: Tensor, *, found_inf: bool) -> None:
        """Add a veto that counts if `flag` turns out to be non-zero or nan."""
        self._deferred.append(_Deferred(veto, flag.ne(0), found_inf))  # a tensor of its own; nan differs from 0

    def read_later(self, tensor: Tensor) -> Reading:
        """Have a tensor read along at the next `resolve`."""
        self._readings.append(reading := Reading(tensor.clone()))  # what it holds now
        return reading

    def veto_flag(self) -> Tensor | None:
        """Return the deferred vetoes as one float32 tensor that is exactly 0 or 1; None if there are none."""
        if not self._deferred:
            return None
        device = self._deferred[0].flag.device
        flags = torch.stack([deferred.flag.to(device) for deferred in self._deferred])
        return flags.any().to(torch.float32)

    def resolve(self, others: Sequence[Tensor] = ()) -> list[float]:
        """Let the host know everything that was deferred, in one read; return the values of `others`."""
        deferred, self._deferred = self._deferred, []
        readings = [reading for reading in self._readings if reading._tensor is not None]
        self._readings = []
        waiting = [reading._tensor for reading in readings if reading._tensor is not None]
        values = read_together([*(item.flag for item in deferred), *others, *waiting])
        for item, value in zip(deferred, values, strict=False):
            if value != 0:
                self.vetoes.append(item.veto)
                self.found_inf |= item.found_inf
        for reading, value in zip(reversed(readings), reversed(values), strict=False):
            reading._take(value)
        return values[len(deferred) : len(deferred) + len(others)]


def _on_host(tensor: Tensor) -> float:
    number: float = tensor.tolist()  # type: ignore[assignment]  # a 0-dim tensor gives a number
    return float(number)


def read_together(tensors: Sequence[Tensor]) -> list[float]:
    """Return 0-dim tensors as floats, with one wait for the device however many they are."""
    on_host = all(tensor.device.type == "cpu" for tensor in tensors)
    if on_host or len(tensors) == 1:
        return [_on_host(tensor) for tensor in tensors]
    device = next(tensor.device for tensor in tensors if tensor.device.type != "cpu")
    wide = torch.float32 if device.type == "mps" else torch.float64
    packed: list[float] = torch.stack([tensor.detach().to(device, wide) for tensor in tensors]).tolist()
    return packed
