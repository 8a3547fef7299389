"""The arithmetic of one window on its gradients: norms, divisors, vetoes, and when they become real."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nvalchemi.errors import HookConflictError, HookContractError
from nvalchemi.training.hooks.decision import Decision, Reading, Veto
from nvalchemi.training.hooks.gradients import OptimizerGradients, combine_norms
from nvalchemi.training.hooks.plan import AverageOffer
from nvalchemi.training.hooks.scaling import drive
from nvalchemi.training.unwrap import bare_module

if TYPE_CHECKING:
    from nvalchemi.hooks.protocols import UpdateExecutor
    from nvalchemi.training.hooks.update import TrainingUpdateHook

__all__ = ["UpdateWindow"]


class UpdateWindow:
    """The batches between two attempts to step the optimizers, seen from their gradients.

    Hooks say here what the update should do: divide, veto, read. Nothing is done until somebody needs it done, so that
    unscaling, clipping and stepping can be one pass over memory. Everything is computed once, whoever asks.

    Parameters
    ----------
    optimizers : sequence of torch.optim.Optimizer
        Whose gradients these are.
    scaler : object, optional
        Who scaled the loss; see `nvalchemi.hooks.GradientScaler`.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], scaler: Any = None) -> None:
        self.optimizers = optimizers
        self.given_scaler = scaler
        self.scaler = drive(scaler)
        self.decision = Decision()
        self.begun = True  # optimizers and scaler are known
        self.closed = False
        self.unscaled = False  # the loss scale has been taken out of some gradients
        self.voting = False  # deferred vetoes count now
        self._at_work: TrainingUpdateHook | None = None
        self._gradients: list[OptimizerGradients] | None = None
        self._grad_norm: Tensor | None = None
        self._noted: str | None = None
        self.executors: Sequence[UpdateExecutor] = ()
        self.offers: list[AverageOffer] = []

    @property
    def knows_grad_norm(self) -> bool:
        """Whether `grad_norm` has been measured."""
        return self._grad_norm is not None

    @property
    def gradients(self) -> list[OptimizerGradients]:
        """What there is for each optimizer, in the order of ``ctx.optimizers``."""
        if self._gradients is None:
            self._gradients = [OptimizerGradients(optimizer) for optimizer in self.optimizers]
            if self.scaler is not None:
                self._refuse_shared()
                for gradients in self._with_gradients():
                    gradients.scale = self.scaler.scale_on(gradients.tensors[0].device)
        return self._gradients

    @property
    def device(self) -> torch.device:
        """Where norms and flags of all optimizers meet."""
        return next((gradients.tensors[0].device for gradients in self._with_gradients()), torch.device("cpu"))

    # What hooks ask for.

    def norm(self, norm_type: float = 2.0, *, optimizer: int | None = None) -> Tensor:
        """Return the norm of the true gradients, with everything divided out that hooks have asked for so far.

        Parameters
        ----------
        norm_type : float
            2.0, 1.0, inf or any other order.
        optimizer : int, optional
            Only the gradients of this optimizer (its place in ``ctx.optimizers``); by default those of all.

        Returns
        -------
        torch.Tensor
            0-dim; float64 if gradients are, else float32. 0.0 where there is no gradient, inf or nan where an element
            is not finite. The loss scale costs no range, and neither does the sum of squares.
        """
        return combine_norms([g.norm(norm_type) for g in self._with_gradients(optimizer)], norm_type, self.device)

    def divide(self, by: Tensor, *, optimizer: int | None = None) -> None:
        """Have the gradients divided by a 0-dim tensor, together with whatever else is pending."""
        chosen = self._with_gradients(optimizer)
        self._refuse_shared()
        for gradients in chosen:
            gradients.divide(by.to(gradients.tensors[0].device))

    def nonfinite(self) -> Tensor:
        """Return 1.0 if any gradient holds an inf or a nan, else 0.0: float32, 0-dim, on the device, exact."""
        flags = [gradients.flag().to(self.device) for gradients in self._with_gradients()]
        if len(flags) == 1:
            return flags[0]
        return torch.stack(flags).amax() if flags else torch.zeros((), device=self.device)

    def materialise(self) -> None:
        """Divide what is pending out of ``.grad``: a reader needs true gradients there."""
        for gradients in self._with_gradients():
            self._unscale(gradients)
            gradients.materialise()

    def tensors(self, *, optimizer: int | None = None) -> list[Tensor]:
        """Return the gradients as they lie in ``.grad``: the values of sparse ones, complex ones as real pairs."""
        return [tensor for gradients in self._with_gradients(optimizer) for tensor in gradients.tensors]

    @property
    def grad_norm(self) -> Tensor:
        """The global L2 norm of the true gradients before clipping: 0-dim."""
        if self._grad_norm is None:
            norms = [gradients.norm_before_clipping() for gradients in self._with_gradients()]
            self._grad_norm = combine_norms(norms, 2.0, self.device)
        return self._grad_norm

    def named_gradients(self, models: Mapping[str, nn.Module]) -> dict[str, Tensor]:
        """Return the unscaled gradients by parameter name; see `TrainContext.gradients`."""
        scales = {id(p): g.scale for g in self.gradients if g.scale is not None for p in g.parameters()}
        owned = {id(parameter) for gradients in self.gradients for parameter in gradients.parameters()}
        named: dict[str, Tensor] = {}
        for key, model in models.items():
            prefix = f"{key}." if len(models) > 1 else ""
            for name, parameter in bare_module(model).named_parameters():
                if parameter.grad is not None and id(parameter) in owned:
                    grad, scale = parameter.grad.detach(), scales.get(id(parameter))
                    named[prefix + name] = grad if scale is None else grad / scale.to(grad.device)
        return named

    # Vetoes and readings.

    @property
    def veto_flag(self) -> Tensor | None:
        """See `TrainContext.veto_flag`."""
        return self.decision.veto_flag()

    @property
    def vetoed(self) -> bool:
        """Whether the host knows of a veto."""
        return bool(self.decision.vetoes)

    def defer_veto(self, flag: object, reason: str, *, found_inf: bool = False) -> None:
        """See `TrainContext.defer_veto`."""
        hook = self._at_work
        if hook is None or not hook.defers_veto:
            who = (
                "Code outside an update hook" if hook is None else f"{type(hook).__name__}, whose defers_veto is False,"
            )
            raise HookContractError(
                f"{who} called defer_veto(reason={reason!r}); set `defers_veto = True` on the hook, or return False."
            )
        if not self.voting:
            raise HookContractError(
                f"{type(hook).__name__} deferred a veto where nobody acts on it: outside before_optimizer_step, or "
                "in a window that is still open (ctx.window_complete is False)."
            )
        if not isinstance(flag, Tensor) or flag.dim() != 0:
            got = f"a tensor of shape {tuple(flag.shape)}" if isinstance(flag, Tensor) else repr(flag)
            raise HookContractError(
                f"{type(hook).__name__} deferred a veto on {got}; give a 0-dim tensor (non-zero or nan vetoes)."
            )
        self.decision.defer(Veto(hook.state_key, reason), flag.detach(), found_inf=found_inf)

    def note_veto(self, reason: str) -> None:
        """See `TrainContext.note_veto`."""
        self._noted = reason

    def veto(self, hook: TrainingUpdateHook) -> None:
        """Count the veto that a hook has returned."""
        reason, self._noted = self._noted, None
        self.decision.vetoes.append(Veto(hook.state_key, reason or "returned False"))

    def read_later(self, tensor: Tensor) -> Reading:
        """See `TrainContext.read_later`."""
        return self.decision.read_later(tensor.detach())

    def offer_average(
        self,
        averages: Sequence[Tensor],
        live: Sequence[Tensor],
        weight: float,
        accumulators: Sequence[Tensor] | None = None,
    ) -> AverageOffer | None:
        """See `TrainContext.offer_average`."""
        if not self.executors:
            return None
        self.offers.append(offer := AverageOffer(averages, live, weight, accumulators))
        return offer

    # What the orchestrator does with it.

    def adopt(self, optimizers: Sequence[torch.optim.Optimizer], scaler: Any) -> None:
        """Take over optimizers and scaler as they are now, before anything was computed."""
        self.optimizers, self.given_scaler, self.scaler = optimizers, scaler, drive(scaler)
        self.begun = True

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
        self._gradients = self._grad_norm = None

    def begin_voting(self) -> None:
        """Let deferred vetoes count, on gradients as they are now: plain hooks may have changed them."""
        self.voting = True
        if self._gradients is not None and any(gradients.have_changed() for gradients in self._gradients):
            self.refresh()

    def begin(self, hook: TrainingUpdateHook) -> None:
        """Note which hook is about to be called."""
        self._at_work, self._noted = hook, None

    def refresh(self) -> None:
        """Forget what was computed: a backward pass has added to the gradients."""
        if not self.unscaled:
            self._gradients = self._grad_norm = None

    def reread(self) -> None:
        """Look at ``.grad`` anew, after a hook that may have changed it; found-inf stays what backward left."""
        measured = self._with_gradients()
        if measured and all(gradients.knows_norm for gradients in measured):
            _ = self.grad_norm  # it stays what it was before the change
        for gradients in measured:
            if self.scaler is not None:
                gradients.flag()
            gradients.collect()

    def resolve(self) -> None:
        """Let the host know the vetoes so far, and which gradients are not finite if a scaler has to know."""
        scaled = self._with_gradients() if self.scaler is not None else []
        measured = [g for g in scaled if g.holds_inf is None]
        products = [g.pending_product() for g in scaled if g.scale is not None and g.divisor is not None]
        flags = self.decision.resolve([*(gradients.flag() for gradients in measured), *products])
        for gradients, flag in zip(measured, flags, strict=False):
            gradients.holds_inf = gradients.found_here = flag != 0
        if not all(math.isfinite(product) for product in flags[len(measured) :]) and not self.vetoed:
            reason = "loss scale times clipping factor overflows, so that gradients would be divided to zero"
            self.decision.vetoes.append(Veto("loss scale", reason))
            self.decision.found_inf = True

    def step(self, gradients: OptimizerGradients) -> None:
        """Step one optimizer on true gradients; one that divides by itself does so in its own pass."""
        optimizer = gradients.optimizer
        if gradients.pending() is not None:
            obstacle = gradients.why_not_folded()
            if self.scaler is not None and not self.scaler.folds:
                obstacle = "the scaler unscales by itself"
            gradients.division = f"plain: {obstacle}" if obstacle else "folded"
            if not obstacle:
                self.unscaled |= self.scaler is not None
                with gradients.divided_by_optimizer():
                    optimizer.step()
                return
        self._unscale(gradients)
        gradients.materialise()
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)

    def close(self, found_inf: bool | None) -> None:
        """End the window, and the scaler's with it; ending it twice is harmless."""
        if self.closed:
            return
        self.closed = True
        if self.scaler is not None:
            if found_inf:
                for gradients in self._with_gradients():
                    if gradients.holds_inf:
                        self._unscale(gradients)  # so that torch's scaler has a record of the inf
            self.scaler.close(found_inf)

    def release(self) -> None:
        """Let go of the gradients, for whoever keeps the context of this window."""
        for gradients in self._gradients or ():
            gradients.release()

    def _refuse_shared(self) -> None:
        if len(self.optimizers) == 1:
            return
        owners: dict[int, int] = {}
        for place, gradients in enumerate(self._gradients or ()):
            for parameter in gradients.parameters():
                if owners.setdefault(id(parameter), place) != place:
                    raise HookConflictError(
                        f"A parameter of shape {tuple(parameter.shape)} is in optimizer {owners[id(parameter)]} and "
                        f"in optimizer {place}, so it would be unscaled and clipped twice; give each parameter one "
                        "optimizer."
                    )

    def _unscale(self, gradients: OptimizerGradients) -> None:
        if self.scaler is not None:
            gradients.flag()  # found-inf is decided on what the backward pass left
            self.unscaled = True
            self.scaler.unscale(gradients)

    def _with_gradients(self, optimizer: int | None = None) -> list[OptimizerGradients]:
        chosen = self.gradients if optimizer is None else [self.gradients[optimizer]]
        return [gradients for gradients in chosen if gradients.tensors]
