"""The arithmetic of one window on its gradients: norms, divisors, vetoes, and when they become real."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nvalchemi.errors import HookConflictError, HookContractError
from nvalchemi.training.hooks.decision import Decision, Reading, Veto, fold_flags, read_together
from nvalchemi.training.hooks.executor import StockExecutor, code_around_step, nobody_around, why_not_folded
from nvalchemi.training.hooks.gradients import OptimizerGradients, combine_norms
from nvalchemi.training.hooks.members import Roster
from nvalchemi.training.hooks.plan import AverageOffer, OptimizerPlan
from nvalchemi.training.hooks.scaling import drive
from nvalchemi.training.hooks.shared import Shared
from nvalchemi.training.unwrap import bare_module

if TYPE_CHECKING:
    from nvalchemi.hooks.protocols import UpdateExecutor
    from nvalchemi.training.hooks.update import TrainingUpdateHook

__all__ = ["UpdateWindow"]

_ROOMY = torch.finfo(torch.float32).max * (1 - 2.0**-16)  # also where factors and product have been rounded
_OVERFLOW = Veto("loss scale", "loss scale times clipping factor overflows, so that gradients would be divided to zero")


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
    executors : sequence of UpdateExecutor
        Who is asked to carry out a step, in this order, before the core's own.
    stock : StockExecutor, optional
        The core's own, with the lists that it keeps from window to window.
    roster : Roster, optional
        The parameters of the optimizers, looked at once.
    """

    begun = True  # optimizers and scaler are known
    closed = False
    unscaled = False  # the loss scale has been taken out of some gradients
    voting = False  # deferred vetoes count now
    at_work: TrainingUpdateHook | None = None  # whose veto, and whose reason, it is
    noted: str | None = None
    shared: tuple[Shared, ...] = ()  # in the order in which hooks asked, which is that of all ranks
    _has_voted = False
    _changed = False  # a hook may have changed gradients
    _gradients: list[OptimizerGradients] | None = None
    _grad_norm: Tensor | None = None
    _device = torch.device("cpu")
    _flag: Tensor | None = None  # the folded veto, while a step that took it along is pending
    _resolve_pending: Callable[[], Any] | None = None

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: Any = None,
        executors: Sequence[UpdateExecutor] = (),
        stock: StockExecutor | None = None,
        roster: Roster | None = None,
    ) -> None:
        self.optimizers = optimizers
        self.given_scaler = scaler
        self.scaler = drive(scaler) if scaler is not None else None
        self.decision = Decision()
        self._normalisers: list[tuple[float | Tensor, float]] = []
        self._measured: list[tuple[Tensor, list[OptimizerGradients]]] = []  # norms handed out, and of what they are
        self._executors, self._stock = executors, stock or StockExecutor()
        self._roster = roster or Roster()
        self._chosen: list[OptimizerGradients] = []
        self._offers: list[AverageOffer] = []

    @property
    def knows_grad_norm(self) -> bool:
        """Whether `grad_norm` has been measured."""
        return self._grad_norm is not None

    @property
    def gradients(self) -> list[OptimizerGradients]:
        """What there is for each optimizer, in the order of ``ctx.optimizers``."""
        if self._gradients is None:
            self._gradients = [OptimizerGradients(one, self._roster.members(one)) for one in self.optimizers]
            self._look_at_gradients()
            if self.scaler is not None:
                self._refuse_shared()
                for gradients in self._chosen:
                    gradients.scale = self.scaler.scale_on(gradients.device)
            for by, at_most in self._normalisers:
                self._normalise(by, at_most)
            if not self._has_voted:  # plain hooks may still change them
                for gradients in self._gradients:
                    gradients.remember()
        return self._gradients

    def _look_at_gradients(self) -> None:
        """Note which optimizers have gradients, and where norms and flags of all of them meet."""
        self._chosen = [gradients for gradients in self._gradients or () if gradients.tensors]
        self._device = self._chosen[0].device if self._chosen else torch.device("cpu")

    @property
    def device(self) -> torch.device:
        """Where norms and flags of all optimizers meet."""
        if self._gradients is None:
            _ = self.gradients
        return self._device

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
        chosen = self._with_gradients(optimizer)
        norm = combine_norms([gradients.norm(norm_type) for gradients in chosen], norm_type, self.device)
        self._measured.append((norm, chosen))
        return norm

    def divide(self, by: Tensor, *, optimizer: int | None = None, at_most: float = math.inf) -> None:
        """Have the gradients divided by a 0-dim tensor, together with whatever else is pending.

        Parameters
        ----------
        by : torch.Tensor
            0-dim, floating, above 0. One that is not finite belongs to a step that is vetoed, and counts as 1.
        optimizer : int, optional
            Only the gradients of this optimizer; by default those of all.
        at_most : float
            What it cannot be above, if that is known: a step that is decided on the device is then spared the check
            that its product with the loss scale is finite.
        """
        chosen = self._with_gradients(optimizer)
        self._refuse_shared()
        for gradients in chosen:
            gradients.divide(by.to(gradients.device), at_most)

    def normalise(self, by: float | Tensor, *, at_most: float = math.inf) -> None:
        """Have the gradients divided by what the window holds, so that a sum over batches becomes a mean.

        It belongs to what true gradients are, as the loss scale does and a clipping factor does not: ``ctx.gradients``,
        ``ctx.grad_norm`` and every norm hold it from now on. It is divided out together with whatever else is pending.
        Called again, it divides by the product.

        Parameters
        ----------
        by : float or torch.Tensor
            Above 0; a tensor is 0-dim and floating. From DO_BACKWARD on, until hooks have decided on the step.
        at_most : float
            What it cannot be above, if that is known; a float is known.
        """
        at_most = at_most if isinstance(by, Tensor) else by
        self._normalisers.append((by, at_most))
        if self._gradients is not None:
            self._normalise(by, at_most)
            self._grad_norm = None

    def _normalise(self, by: float | Tensor, at_most: float) -> None:
        self._refuse_shared()
        for gradients in self._chosen:
            wide = torch.float64 if gradients.double else torch.float32
            if isinstance(by, Tensor):
                gradients.normalise(by.to(gradients.device, wide), at_most)
            else:
                gradients.normalise(torch.full((), by, dtype=wide, device=gradients.device), at_most)

    def nonfinite(self) -> Tensor:
        """Return 1.0 if any gradient holds an inf or a nan, else 0.0: float32, 0-dim, on the device, exact."""
        peaks = [gradients.peak() for gradients in self._with_gradients()]
        return fold_flags([], peaks, self.device) if peaks else torch.zeros((), device=self.device)

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
        scales = {id(p): g.scale for g in self.gradients if g.scale is not None for p in g.parameters}
        owned = {id(parameter) for gradients in self.gradients for parameter in gradients.parameters}
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
        return self.decision.veto_flag() if self._flag is None else self._flag

    @property
    def vetoed(self) -> bool:
        """Whether the host knows of a veto."""
        return bool(self.decision.vetoes)

    def defer_veto(self, flag: object, reason: str, *, found_inf: bool = False) -> None:
        """See `TrainContext.defer_veto`."""
        hook = self._deferring(reason)
        self.decision.defer(hook, reason, _scalar(flag, hook), found_inf=found_inf)

    def defer_veto_above(self, value: object, limit: float, reason: str, *, found_inf: bool = False) -> None:
        """See `TrainContext.defer_veto_above`."""
        hook = self._deferring(reason)
        self.decision.defer_above(hook, reason, _scalar(value, hook), limit, found_inf=found_inf)

    def defer_veto_nonfinite(self, reason: str) -> None:
        """See `TrainContext.defer_veto_nonfinite`."""
        hook = self._deferring(reason)
        peaks = [gradients.peak() for gradients in self._with_gradients()]
        self.decision.defer_nonfinite(hook, reason, peaks)

    def note_veto(self, reason: str) -> None:
        """See `TrainContext.note_veto`."""
        self.noted = reason

    def veto(self, hook: TrainingUpdateHook) -> None:
        """Count the veto that a hook has returned."""
        reason, self.noted = self.noted, None
        self.decision.vetoes.append(Veto(hook.state_key, reason or "returned False"))

    def share(self, value: float | Tensor) -> Shared:
        """See `TrainContext.share`."""
        if self._has_voted:
            raise HookContractError(
                "A number was shared after the ranks have exchanged theirs for this step; share it earlier, in "
                "transform_loss or at AFTER_BACKWARD for example."
            )
        self.shared = (*self.shared, one := Shared(value))
        return one

    def read_later(self, tensor: Tensor) -> Reading:
        """See `TrainContext.read_later`."""
        own = any(tensor is norm for norm, _ in self._measured)  # nobody changes these
        return self.decision.read_later(tensor if own else tensor.detach().clone())  # what it holds now

    def offer_average(
        self,
        averages: Sequence[Tensor],
        live: Sequence[Tensor],
        weight: float,
        accumulators: Sequence[Tensor] | None = None,
    ) -> AverageOffer | None:
        """See `TrainContext.offer_average`."""
        if not self._executors:
            return None
        self._offers.append(offer := AverageOffer(averages, live, weight, accumulators))
        return offer

    # What the orchestrator does with it.

    def adopt(self, optimizers: Sequence[torch.optim.Optimizer], scaler: Any) -> None:
        """Take over optimizers and scaler as they are now, before anything was computed."""
        self.optimizers = optimizers
        if scaler is not self.given_scaler:
            self.given_scaler, self.scaler = scaler, drive(scaler)
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
        self.voting = self._has_voted = True
        if self._gradients is not None and any(gradients.have_changed() for gradients in self._gradients):
            self.refresh()
        for one in self.shared:
            one.settle()

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
                gradients.peak()
            gradients.collect()
        self._look_at_gradients()
        self._measured.clear()
        self._changed = True

    def resolve(self) -> None:
        """Let the host know the vetoes so far, and which gradients are not finite if a scaler has to know."""
        if self.scaler is not None or self.decision.waits:
            numbers, take = self.ask()
            take(read_together(numbers))

    def ask(self) -> tuple[list[Tensor], Callable[[Sequence[float]], None]]:
        """Return the numbers on which the step depends, and who takes their values once the host knows them."""
        divided = self._with_gradients() if self.scaler is not None or self._normalisers else []
        measured = [gradients for gradients in divided if gradients.holds_inf is None and self.scaler is not None]
        products = [gradients.pending_product() for gradients in divided if gradients.has_product]
        deferred, take_deferred = self.decision.ask()

        def take(values: Sequence[float]) -> None:
            first, second = len(deferred), len(deferred) + len(measured)
            take_deferred(values[:first])
            for gradients, peak in zip(measured, values[first:second], strict=True):
                gradients.holds_inf = gradients.found_here = not math.isfinite(peak)
            if not all(map(math.isfinite, values[second:])) and not self.vetoed:
                self.decision.vetoes.append(_OVERFLOW)
                self.decision.found_inf = True

        return [*deferred, *(gradients.peak() for gradients in measured), *products], take

    def fold(self) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return all vetoes as one flag, and the flag of each optimizer that has gradients, in which it may differ.

        A flag is float32, 0-dim, exactly 0 or 1; None where nothing can veto.
        """
        deferred, chosen, bounded = self.decision.deferred, self._with_gradients(), self._bounded()
        spared = all(any(gradients is one for one in bounded) for gradients in chosen)
        counted = [one for one in deferred if not (one.nonfinite and spared)]
        products = [g.pending_product() for g in chosen if g.has_product and not self._fits(g)]
        common = fold_flags(counted, products, self.device) if counted or products else None
        if self.scaler is None or spared or any(one.nonfinite for one in deferred):
            return common, [common] * len(chosen)
        own = [fold_flags([], [gradients.peak()], self.device) for gradients in chosen]
        return common, list(own) if common is None else [torch.maximum(common, flag) for flag in own]

    def step(self, gradients: OptimizerGradients) -> None:
        """Step one optimizer for certain, on true gradients; one that divides by itself does so in its own pass."""
        if self.execute(gradients, None):
            return
        self._unscale(gradients)
        gradients.materialise()
        if self.scaler is None:
            gradients.optimizer.step()
        else:
            self.scaler.step(gradients.optimizer)

    def execute(self, gradients: OptimizerGradients, veto_flag: Tensor | None, *, alone: bool = False) -> bool:
        """Have an executor step one optimizer, under a veto that is still on the device or none at all.

        Averages do not go along with a step that may be held back `alone`: they follow whatever steps.
        """
        optimizer, pending = gradients.optimizer, gradients.pending()
        if self.scaler is not None and not self.scaler.folds:
            obstacle = "the scaler unscales by itself"
        elif not (obstacle := code_around_step(optimizer)):
            divisor = None if pending is None else pending.to(torch.float32)
            flag = veto_flag if veto_flag is None else veto_flag.to(gradients.device)
            offers = () if alone else tuple(self._offers)
            plan = OptimizerPlan(optimizer, gradients.with_grad, divisor, flag, offers)
            others = self._executors if nobody_around(optimizer) else ()
            for executor in (*others, self._stock):
                if executor.execute(plan):
                    gradients.left_undivided = executor is not self._stock
                    by = "" if executor is self._stock else f" by {type(executor).__name__}"
                    gradients.division = f"folded{by}" if by or pending is not None else ""
                    if veto_flag is None:
                        self.settle_division(gradients)
                    return True
            obstacle = why_not_folded(optimizer, gradients.tensors)
        gradients.division = f"plain: {obstacle}" if pending is not None else ""
        return False

    def settle_division(self, gradients: OptimizerGradients) -> None:
        """Note that the step of one optimizer has divided what was pending out of its gradients, if it writes them."""
        if gradients.left_undivided:
            return
        self.unscaled |= self.scaler is not None
        gradients.settle_division()

    def await_outcome(self, veto_flag: Tensor | None, resolve: Callable[[], Any] | None) -> None:
        """Have `resolve` called before anybody looks at gradients again: what they are depends on the outcome."""
        self._flag, self._resolve_pending = veto_flag, resolve

    def close(self, found_inf: bool | Tensor | None) -> None:
        """End the window, and the scaler's with it; ending it twice is harmless."""
        if self.closed:
            return
        self.closed = True
        if self.scaler is not None:
            if found_inf is True:
                for gradients in self._with_gradients():
                    if gradients.holds_inf:
                        self._unscale(gradients)  # so that torch's scaler has a record of the inf
            self.scaler.close(found_inf)

    def release(self) -> None:
        """Let go of the gradients, for whoever keeps the context of this window."""
        for gradients in self._gradients or ():
            gradients.release()
        self._chosen = []

    def _deferring(self, reason: str) -> TrainingUpdateHook:
        """Return the hook at work, which must be one that may defer a veto, here and now."""
        hook = self.at_work
        if hook is None or not hook.defers_veto:
            who = (
                "Code outside an update hook" if hook is None else f"{type(hook).__name__}, whose defers_veto is False,"
            )
            raise HookContractError(
                f"{who} called defer_veto(reason={reason!r}); set `defers_veto = True` on the hook, or return False."
            )
        if not hook.may_veto:
            raise HookContractError(
                f"{type(hook).__name__}, whose may_veto is False, called defer_veto(reason={reason!r}); leave may_veto "
                "out, or do not veto."
            )
        if not self.voting:
            raise HookContractError(
                f"{type(hook).__name__} deferred a veto where nobody acts on it: outside before_optimizer_step, or "
                "in a window that is still open (ctx.window_complete is False)."
            )
        return hook

    def _bounded(self) -> list[OptimizerGradients]:
        """Return the gradients that are finite if no deferred veto on a norm of theirs counts."""
        if self._changed:  # what a hook has made of them says nothing of what the backward pass left
            return []
        numbers = [number for one in self.decision.deferred if not one.nonfinite for number in one.numbers]
        return [g for norm, chosen in self._measured if any(norm is number for number in numbers) for g in chosen]

    def _fits(self, gradients: OptimizerGradients) -> bool:
        """Return whether loss scale times divisor is finite whatever happens."""
        largest = 1.0 if self.scaler is None else self.scaler.largest
        return largest * gradients.largest_divisor <= _ROOMY

    def _refuse_shared(self) -> None:
        if len(self.optimizers) == 1:
            return
        owners: dict[int, int] = {}
        for place, gradients in enumerate(self._gradients or ()):
            for parameter in gradients.parameters:
                if owners.setdefault(id(parameter), place) != place:
                    raise HookConflictError(
                        f"A parameter of shape {tuple(parameter.shape)} is in optimizer {owners[id(parameter)]} and "
                        f"in optimizer {place}, so it would be unscaled and clipped twice; give each parameter one "
                        "optimizer."
                    )

    def _unscale(self, gradients: OptimizerGradients) -> None:
        if self.scaler is not None:
            gradients.peak()  # found-inf is decided on what the backward pass left
            self.unscaled = True
            self.scaler.unscale(gradients)

    def _with_gradients(self, optimizer: int | None = None) -> list[OptimizerGradients]:
        if self._resolve_pending is not None:
            self._resolve_pending()
        gradients = self.gradients
        if optimizer is None:
            return self._chosen
        return [gradients[optimizer]] if gradients[optimizer].tensors else []


def _scalar(number: object, hook: object) -> Tensor:
    if not isinstance(number, Tensor) or number.dim() != 0:
        got = f"a tensor of shape {tuple(number.shape)}" if isinstance(number, Tensor) else repr(number)
        raise HookContractError(
            f"{type(hook).__name__} deferred a veto on {got}; give a 0-dim tensor (non-zero or nan vetoes)."
        )
    return number.detach() if number.requires_grad else number
