"""The gradients of all optimizers in one window: measured together, divided together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi.errors import HookConflictError, HookContractError
from nvalchemi.training.hooks.decision import fold_flags
from nvalchemi.training.hooks.gradients import OptimizerGradients, combine_norms
from nvalchemi.training.hooks.members import Roster
from nvalchemi.training.hooks.scaling import ScalerDriver, drive
from nvalchemi.training.unwrap import bare_module

__all__ = ["WindowGradients"]

_are_there = attrgetter("are_there")
_CPU = torch.device("cpu")
_ROOMY = torch.finfo(torch.float32).max * (1 - 2.0**-16)  # also where factors and product have been rounded


class WindowGradients:
    """What there is for each optimizer, looked at when somebody asks.

    Parameters
    ----------
    optimizers : sequence of torch.optim.Optimizer
        Whose gradients these are.
    scaler : object, optional
        Who scaled the loss; see `nvalchemi.hooks.GradientScaler`.
    roster : Roster
        The parameters of the optimizers, looked at once.

    Attributes
    ----------
    given_scaler : object or None
        The scaler itself.
    scaler : ScalerDriver or None
        Who drives the scaler in this window.
    unscaled : bool
        The loss scale has been taken out of some gradients.
    changed : bool
        A hook may have changed gradients.
    normalisers : list of (float or torch.Tensor, float)
        What the gradients are divided by to be true, and what each of them is at most.
    measured : list of (torch.Tensor, list of OptimizerGradients)
        Norms that were handed out, and of what they are.
    before_looking : callable or None
        Called before anybody looks at gradients: what they are depends on a step that is pending.
    """

    unscaled = False
    changed = False
    before_looking: Callable[[], Any] | None = None
    _watching = True  # plain hooks may still change gradients
    _known: list[OptimizerGradients] | None = None
    _grad_norm: Tensor | None = None
    _device = _CPU

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], scaler: Any, roster: Roster) -> None:
        self.optimizers = optimizers
        self.normalisers: list[tuple[float | Tensor, float]] = []
        self.measured: list[tuple[Tensor, list[OptimizerGradients]]] = []
        self.given_scaler = scaler
        self.scaler: ScalerDriver | None = drive(scaler) if scaler is not None else None
        self._roster = roster
        self._chosen: list[OptimizerGradients] = []

    @property
    def everybody(self) -> list[OptimizerGradients]:
        """The gradients of each optimizer, in the order of the optimizers."""
        return self._collect() if self._known is None else self._known

    @property
    def device(self) -> torch.device:
        """Where norms and flags of all optimizers meet."""
        if self._known is None:
            self._collect()
        return self._device

    @property
    def knows_grad_norm(self) -> bool:
        """Whether `grad_norm` has been measured."""
        return self._grad_norm is not None

    @property
    def grad_norm(self) -> Tensor:
        """The global L2 norm of the true gradients before clipping: 0-dim."""
        if self._grad_norm is None:
            norms = [gradients.norm_before_clipping() for gradients in self.chosen()]
            self._grad_norm = combine_norms(norms, 2.0, self.device)
        return self._grad_norm

    def chosen(self, optimizer: int | None = None) -> list[OptimizerGradients]:
        """Return those that there are, of all optimizers or of the one at a place."""
        if self.before_looking is not None:
            self.before_looking()
        everybody = self._collect() if self._known is None else self._known
        if optimizer is None:
            return self._chosen
        return [everybody[optimizer]] if everybody[optimizer].are_there else []

    # What is asked of them.

    def norm(self, norm_type: float, optimizer: int | None) -> Tensor:
        """See `UpdateWindow.norm`."""
        chosen = self.chosen(optimizer)
        if len(chosen) == 1:
            norm = chosen[0].norm(norm_type).to(self._device)
        else:
            norm = combine_norms([gradients.norm(norm_type) for gradients in chosen], norm_type, self._device)
        self.measured.append((norm, chosen))
        return norm

    def divide(self, by: Tensor, optimizer: int | None, at_most: float) -> None:
        """See `UpdateWindow.divide`."""
        chosen = self.chosen(optimizer)
        if len(self.optimizers) > 1:
            self.refuse_shared()
        for gradients in chosen:
            gradients.divide(by.to(gradients.device), at_most)

    def normalise(self, by: float | Tensor, at_most: float) -> None:
        """See `UpdateWindow.normalise`."""
        self.normalisers.append((by, at_most))
        if self._known is not None:
            self._normalise(by, at_most)
            self._grad_norm = None

    def peaks(self) -> list[Tensor]:
        """Return norms that are finite just where all gradients are: 0-dim, one for each optimizer that has any."""
        return list(map(OptimizerGradients.peak, self.chosen()))

    def nonfinite(self) -> Tensor:
        """See `UpdateWindow.nonfinite`."""
        peaks = self.peaks()
        return fold_flags([], peaks, self.device) if peaks else torch.zeros((), device=self.device)

    def unscale(self, gradients: OptimizerGradients) -> None:
        """Let the scaler know that the gradients of one optimizer are about to be divided."""
        if self.scaler is not None:
            gradients.peak()  # found-inf is decided on what the backward pass left
            self.unscaled = True
            self.scaler.unscale(gradients)

    def materialise(self) -> None:
        """See `UpdateWindow.materialise`."""
        for gradients in self.chosen():
            self.unscale(gradients)
            gradients.materialise()

    def named(self, models: Mapping[str, nn.Module]) -> dict[str, Tensor]:
        """Return the unscaled gradients by parameter name; see `TrainContext.gradients`."""
        scales = {id(p): g.scale for g in self.everybody if g.scale is not None for p in g.parameters}
        owned = {id(parameter) for gradients in self.everybody for parameter in gradients.parameters}
        named: dict[str, Tensor] = {}
        for key, model in models.items():
            prefix = f"{key}." if len(models) > 1 else ""
            for name, parameter in bare_module(model).named_parameters():
                if parameter.grad is not None and id(parameter) in owned:
                    grad, scale = parameter.grad.detach(), scales.get(id(parameter))
                    named[prefix + name] = grad if scale is None else grad / scale.to(grad.device)
        return named

    def fits(self, gradients: OptimizerGradients) -> bool:
        """Return whether loss scale times divisor is finite whatever happens."""
        largest = 1.0 if self.scaler is None else self.scaler.largest
        return largest * gradients.largest_divisor <= _ROOMY

    def refuse_shared(self) -> None:
        """Refuse a parameter that two optimizers hold."""
        if len(self.optimizers) == 1:
            return
        owners: dict[int, int] = {}
        for place, gradients in enumerate(self._known or ()):
            for parameter in gradients.parameters:
                if owners.setdefault(id(parameter), place) != place:
                    raise HookConflictError(
                        f"A parameter of shape {tuple(parameter.shape)} is in optimizer {owners[id(parameter)]} and "
                        f"in optimizer {place}, so it would be unscaled and clipped twice; give each parameter one "
                        "optimizer."
                    )

    # When they have to be looked at anew.

    def adopt(self, optimizers: Sequence[torch.optim.Optimizer], scaler: Any) -> None:
        """Take over optimizers and scaler as they are now, before anything was computed."""
        self.optimizers = optimizers
        if scaler is not self.given_scaler:
            self.given_scaler, self.scaler = scaler, drive(scaler)

    def follow(self, scaler: Any) -> None:
        """Go on with a scaler that was set after the window began, unless gradients have been unscaled by another."""
        if scaler is None or scaler is self.given_scaler:
            return
        if self.unscaled:
            raise HookContractError(
                f"ctx.grad_scaler became a {type(scaler).__name__} after gradients were unscaled; "
                "set it at BEFORE_BATCH."
            )
        self.adopt(self.optimizers, scaler)
        self._known = self._grad_norm = None

    def stop_watching(self) -> None:
        """Look anew if plain hooks have changed them; from now on nobody does without saying so."""
        self._watching = False
        if self._known is not None and any(gradients.have_changed() for gradients in self._known):
            self.refresh()

    def refresh(self) -> None:
        """Forget what was computed: a backward pass has added to the gradients."""
        if not self.unscaled:
            self._known = self._grad_norm = None

    def reread(self) -> None:
        """Look at ``.grad`` anew, after a hook that may have changed it; found-inf stays what backward left."""
        measured = self.chosen()
        if measured and all(gradients.knows_norm for gradients in measured):
            _ = self.grad_norm  # it stays what it was before the change
        for gradients in measured:
            if self.scaler is not None:
                gradients.peak()
            gradients.collect()
        self._look()
        self.measured.clear()
        self.changed = True

    def release(self) -> None:
        """Let go of the gradients, for whoever keeps the context of this window."""
        for gradients in self._known or ():
            gradients.release()
        self._chosen = []

    def _collect(self) -> list[OptimizerGradients]:
        """Look at the gradients of every optimizer, and note what is pending on them."""
        self._known = known = []
        for optimizer in self.optimizers:
            known.append(OptimizerGradients(optimizer, self._roster.members(optimizer)))
        self._look()
        if self.scaler is not None:
            if len(self.optimizers) > 1:
                self.refuse_shared()
            for gradients in self._chosen:
                gradients.scale = self.scaler.scale_on(gradients.device)
        for by, at_most in self.normalisers:
            self._normalise(by, at_most)
        if self._watching:
            for gradients in known:
                gradients.remember()
        return known

    def _normalise(self, by: float | Tensor, at_most: float) -> None:
        self.refuse_shared()
        for gradients in self._chosen:
            wide, device = torch.float64 if gradients.double else torch.float32, gradients.device
            factor = by.to(device, wide) if isinstance(by, Tensor) else torch.full((), by, dtype=wide, device=device)
            gradients.normalise(factor, at_most)

    def _look(self) -> None:
        """Note which optimizers have gradients, and where norms and flags of all of them meet."""
        self._chosen = list(filter(_are_there, self._known or ()))
        self._device = self._chosen[0].device if self._chosen else _CPU
