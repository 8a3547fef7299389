"""Whether the step is taken: vetoes that the host knows, vetoes that are still on the device, one read for all."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nvalchemi.training.hooks.update import TrainingUpdateHook

__all__ = ["Decision", "Reading", "Veto", "fold_flags", "read_together"]


_is_cpu, _numbers = attrgetter("is_cpu"), attrgetter("numbers")
_LARGEST = torch.finfo(torch.float64).max


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


class Deferred(NamedTuple):
    """A veto that counts if one of some numbers on the device says so."""

    hook: TrainingUpdateHook
    reason: str
    numbers: list[Tensor]
    limit: float | None  # what none of them may be above (nan is above it); None: what is not zero vetoes
    found_inf: bool
    nonfinite: bool = False  # the numbers are the peaks of all gradients

    def vetoes(self, values: Sequence[float]) -> bool:
        """Return whether the numbers, now on the host, veto."""
        limit = self.limit
        if limit is None:
            return any(values)  # nan is not 0 either
        for value in values:  # noqa: SIM110 - quicker than a generator for so few
            if not value <= limit:
                return True
        return False


class Decision:
    """The vetoes of one window."""

    def __init__(self) -> None:
        self.vetoes: list[Veto] = []
        self.found_inf = False
        self.deferred: list[Deferred] = []
        self._readings: list[Reading] = []
        self.asked: list[Reading] = []  # those whose values are on their way

    def defer(self, hook: TrainingUpdateHook, reason: str, flag: Tensor, *, found_inf: bool) -> None:
        """Add a veto that counts if `flag` turns out to be non-zero or nan."""
        self.deferred.append(
            Deferred(hook, reason, [flag.ne(0)], None, found_inf)
        )  # a tensor of its own; nan differs from 0

    def defer_above(
        self, hook: TrainingUpdateHook, reason: str, number: Tensor, limit: float, *, found_inf: bool
    ) -> None:
        """Add a veto that counts if `number` turns out to be above `limit` or nan."""
        if number.dtype not in (torch.float32, torch.float64):
            number = number.to(torch.float32)
        if number.dtype == torch.float32:
            limit = _float32(limit)  # as the device compares it
        self.deferred.append(Deferred(hook, reason, [number], limit, found_inf))

    def defer_nonfinite(self, hook: TrainingUpdateHook, reason: str, peaks: list[Tensor]) -> None:
        """Add a veto that counts if one of the `peaks` of all gradients turns out not to be finite."""
        self.deferred.append(Deferred(hook, reason, peaks, _LARGEST, found_inf=True, nonfinite=True))

    def read_later(self, tensor: Tensor) -> Reading:
        """Have a tensor read along at the next `ask`."""
        self._readings.append(reading := Reading(tensor))
        return reading

    @property
    def waits(self) -> bool:
        """Whether anything is to be read from the device."""
        return bool(self.deferred or self._readings)

    def veto_flag(self) -> Tensor | None:
        """Return the deferred vetoes as one float32 tensor that is exactly 0 or 1; None if there are none."""
        return fold_flags(self.deferred) if any(map(_numbers, self.deferred)) else None

    def ask(self) -> tuple[list[Tensor], Callable[[Sequence[float]], None]]:
        """Return the numbers that the host has to know, and who takes their values, with which others may follow."""
        deferred, self.deferred = self.deferred, []
        numbers: list[Tensor] = []
        for one in deferred:
            numbers += one.numbers
        readings: list[Reading] = []
        for reading in self._readings:
            if reading._tensor is not None:
                readings.append(reading)
                numbers.append(reading._tensor)
        self._readings, self.asked = [], readings

        def take(values: Sequence[float]) -> None:
            place = 0
            for one in deferred:
                end = place + len(one.numbers)
                if one.vetoes(values[place:end]):
                    self.vetoes.append(Veto(one.hook.state_key, one.reason))
                    self.found_inf |= one.found_inf
                place = end
            for reading in readings:
                reading._take(float(values[place]))
                place += 1

        return numbers, take


def fold_flags(
    deferred: Sequence[Deferred], bounds: Sequence[Tensor] = (), device: torch.device | None = None
) -> Tensor:
    """Return one flag for many: float32, 0-dim, exactly 1 if any vetoes, else exactly 0. The host does not wait.

    Parameters
    ----------
    deferred : sequence of Deferred
        Vetoes by what the device knows.
    bounds : sequence of torch.Tensor
        Numbers, 0 or above, that veto where they are not finite.
    device : torch.device, optional
        Where the flag is wanted; by default where the first number is.
    """
    terms: list[Tensor] = []
    for number in bounds:
        terms.append(above(number, torch.finfo(number.dtype).max))
    for one in deferred:
        for number in one.numbers:
            terms.append(number if one.limit is None else above(number, one.limit))
    where = device or terms[0].device
    total = terms[0].to(where)
    for term in terms[1:]:
        total = total + term.to(where)  # none is below zero, so that none cancels another; two bools are or-ed
    if total.dtype == torch.bool:
        return total.to(torch.float32)
    return total.ne(0).to(torch.float32) if total.dtype != torch.float32 else total.ne_(0)


def above(number: Tensor, limit: float) -> Tensor:
    """Return 0 if a number, 0 or above, is at most `limit`, and something else, nan perhaps, if it is above or nan."""
    return torch.threshold(number, min(limit, torch.finfo(number.dtype).max), 0.0)


@functools.lru_cache
def _float32(number: float) -> float:
    return float(struct.unpack("f", struct.pack("f", number))[0])


def read_together(tensors: Sequence[Tensor]) -> list[float]:
    """Return 0-dim tensors as floats, with one wait for the device however many they are."""
    if len(tensors) == 1 or all(map(_is_cpu, tensors)):
        return list(map(Tensor.tolist, tensors))  # type: ignore[arg-type]  # a 0-dim tensor gives a number
    numbers: list[float] = pack(tensors).tolist()
    return numbers


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return 0-dim tensors as one on the first device that is not the host, in double precision where there is any."""
    device = next(tensor.device for tensor in tensors if tensor.device.type != "cpu")
    wide = torch.float32 if device.type == "mps" else torch.float64
    return torch.stack([tensor.detach().to(device, wide) for tensor in tensors])
