"""Driving a loss scaler: one that folds into the update, or one with the interface of ``torch.amp.GradScaler``."""

from __future__ import annotations

import math
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nvalchemi.hooks.protocols import GradientScaler
from nvalchemi.training.hooks.gradients import OptimizerGradients

__all__ = ["ScalerDriver", "drive"]


_KNOWN: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


class ScalerDriver(Protocol):
    """What the update asks of a scaler in one window."""

    folds: bool  # unscaling may be left to the optimizer's own pass

    @property
    def largest(self) -> float:
        """What the scale is at most."""

    def scale_on(self, device: torch.device) -> Tensor:
        """Return the scale that gradients carry: 0-dim, on `device`."""

    def unscale(self, gradients: OptimizerGradients) -> None:
        """Take note that one optimizer's gradients are about to be divided."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step an optimizer whose gradients are finite and true."""

    def close(self, found_inf: bool | Tensor | None) -> None:
        """End the window: back off, count a good step, or (None) leave everything as it is.

        A tensor is 1 or 0 and still on the device; one that does not fold is never given any.
        """


def drive(scaler: Any) -> ScalerDriver | None:
    """Return who drives `scaler` through one window; None if nothing is scaled."""
    if scaler is None or not scaler.is_enabled():
        return None
    return _Folding(scaler) if _folds(type(scaler), scaler) else _TorchInterface(scaler)


def _folds(kind: type, scaler: object) -> bool:
    """Return whether a scaler has the protocol; looked up once a class, for the look-up is slow."""
    folds = _KNOWN.get(kind)
    if folds is None:
        folds = _KNOWN[kind] = isinstance(scaler, GradientScaler)
    return folds


class _Folding:
    """A scaler that hands out its divisor and is told how the window ended."""

    folds = True

    def __init__(self, scaler: GradientScaler) -> None:
        self._scaler = scaler
        self.scale_on = scaler.divisor
        self.close = scaler.close

    @property
    def largest(self) -> float:
        """What the scale is at most, asked only where it matters: while a veto stays on the device."""
        return float(getattr(self._scaler, "largest_scale", 2.0**64))

    def unscale(self, gradients: OptimizerGradients) -> None:
        """Leave it to the common division."""

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step."""
        optimizer.step()


class _TorchInterface:
    """``torch.amp.GradScaler`` or its like: ``unscale_`` once an optimizer, ``step``, ``update`` once a window."""

    folds = False
    largest = math.inf

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._unscaled: list[OptimizerGradients] = []

    def scale_on(self, device: torch.device) -> Tensor:
        """Read the scale through the public interface, without the host."""
        scale: Tensor = self._scaler.scale(torch.ones((), device=device))
        return scale

    def unscale(self, gradients: OptimizerGradients) -> None:
        """Have the scaler unscale these gradients and record their inf, unless it has done so in this window."""
        if any(gradients is other for other in self._unscaled):
            return
        self._unscaled.append(gradients)
        loss_scale = self.scale_on(gradients.device)
        self._scaler.unscale_(gradients.optimizer)
        gradients.settle_scale(loss_scale)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step through the scaler, which keeps a record of it."""
        self._scaler.step(optimizer)

    def close(self, found_inf: bool | Tensor | None) -> None:
        """Call ``update`` so that the scale does what the window deserves."""
        device = self._unscaled[0].device if self._unscaled else torch.device("cpu")
        if found_inf is None:
            if self._unscaled:  # a window is open; given a new scale, update() ends it without growth
                self._scaler.update(self._scaler.scale(torch.ones((), device=device)))
            return
        if found_inf and not any(gradients.found_here for gradients in self._unscaled):
            self._record_inf(device)
        if self._unscaled or found_inf:
            self._scaler.update()

    def _record_inf(self, device: torch.device) -> None:
        """Make the scaler find an inf that its own check cannot see: an overflowing norm, another rank's gradients."""
        probe = torch.nn.Parameter(torch.zeros((), device=device))
        probe.grad = torch.full_like(probe, torch.inf)
        self._scaler.unscale_(torch.optim.SGD([probe]))
