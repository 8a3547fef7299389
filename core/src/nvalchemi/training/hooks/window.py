"""What hooks ask of one window, and what they say to it: norms, divisors, vetoes, readings, averages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nvalchemi.training.hooks.carrying_out import Carrier
from nvalchemi.training.hooks.decision import Decision, Reading, Veto, read_together
from nvalchemi.training.hooks.deferring import Turn, checked_deferrer, checked_divisor, checked_scalar
from nvalchemi.training.hooks.folding import fold
from nvalchemi.training.hooks.gradients import OptimizerGradients
from nvalchemi.training.hooks.members import Roster
from nvalchemi.training.hooks.plan import AverageOffer
from nvalchemi.training.hooks.shared import Shared, too_late
from nvalchemi.training.hooks.window_gradients import WindowGradients

if TYPE_CHECKING:
    from nvalchemi.training.hooks.ranks import RanksOfWindow
    from nvalchemi.training.hooks.scaling import ScalerDriver
    from nvalchemi.training.hooks.update import TrainingUpdateHook

__all__ = ["UpdateWindow"]

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
    carrier : Carrier, optional
        Who steps the optimizers, with the lists that are kept from window to window.
    roster : Roster, optional
        The parameters of the optimizers, looked at once.
    turn : Turn, optional
        Which hook is at work.
    """

    begun = True  # optimizers and scaler are known
    closed = False
    voting = False  # deferred vetoes count now
    noted: tuple[TrainingUpdateHook | None, str] = (None, "")  # the reason of a veto, and whose it is
    raw_loss: Tensor | None = None  # during a backward pass: the loss that no hook has transformed yet
    shared: tuple[Shared, ...] = ()  # in the order in which hooks asked, which is that of all ranks
    exchanged = False  # what ranks share is known
    ranks: RanksOfWindow | None = None  # with whom it was exchanged; None: this is the only one
    _flag: Tensor | None = None  # the folded veto, while a step that took it along is pending

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: Any = None,
        carrier: Carrier | None = None,
        roster: Roster | None = None,
        turn: Turn | None = None,
    ) -> None:
        self.decision = Decision()
        self._gradients = WindowGradients(optimizers, scaler, roster or Roster())
        self._carrier = carrier or Carrier()
        self._offers: list[AverageOffer] = []
        self._turn = turn or Turn()

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers whose gradients these are."""
        return self._gradients.optimizers

    @property
    def scaler(self) -> ScalerDriver | None:
        """Who drives the loss scaler in this window."""
        return self._gradients.scaler

    @property
    def unscaled(self) -> bool:
        """Whether the loss scale has been taken out of some gradients."""
        return self._gradients.unscaled

    @property
    def gradients(self) -> list[OptimizerGradients]:
        """What there is for each optimizer, in the order of ``ctx.optimizers``."""
        return self._gradients.everybody

    @property
    def device(self) -> torch.device:
        """Where norms and flags of all optimizers meet."""
        return self._gradients.device

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
        return self._gradients.norm(norm_type, optimizer)

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
        self._gradients.divide(by, optimizer, at_most)

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
            What a tensor cannot be above, if that is known.

        Raises
        ------
        HookContractError
            A ``TypeError``: it is no finite number above 0, and no 0-dim tensor.
        """
        by = checked_divisor(by)
        self._gradients.normalise(by, at_most if isinstance(by, Tensor) else by)

    def nonfinite(self) -> Tensor:
        """Return 1.0 if any gradient holds an inf or a nan, else 0.0: float32, 0-dim, on the device, exact."""
        return self._gradients.nonfinite()

    def materialise(self) -> None:
        """Divide what is pending out of ``.grad``: a reader needs true gradients there."""
        self._gradients.materialise()

    def tensors(self, *, optimizer: int | None = None) -> list[Tensor]:
        """Return the gradients as they lie in ``.grad``: the values of sparse ones, complex ones as real pairs."""
        return [tensor for gradients in self._gradients.chosen(optimizer) for tensor in gradients.tensors]

    @property
    def knows_grad_norm(self) -> bool:
        """Whether `grad_norm` has been measured."""
        return self._gradients.knows_grad_norm

    @property
    def grad_norm(self) -> Tensor:
        """The global L2 norm of the true gradients before clipping: 0-dim."""
        return self._gradients.grad_norm

    def named_gradients(self, models: Mapping[str, nn.Module]) -> dict[str, Tensor]:
        """Return the unscaled gradients by parameter name; see `TrainContext.gradients`."""
        return self._gradients.named(models)

    # Vetoes and readings.

    @property
    def veto_flag(self) -> Tensor | None:
        """See `TrainContext.veto_flag`."""
        if self._flag is None and self.decision.deferred:  # most often the host knows
            return self.decision.veto_flag()
        return self._flag

    @property
    def vetoed(self) -> bool:
        """Whether the host knows of a veto."""
        return bool(self.decision.vetoes)

    def defer_veto(self, flag: object, reason: str, *, found_inf: bool = False) -> None:
        """See `TrainContext.defer_veto`."""
        hook = checked_deferrer(self._turn.hook, reason, voting=self.voting)
        self.decision.defer(hook, reason, checked_scalar(flag, hook), found_inf=found_inf)

    def defer_veto_above(self, value: object, limit: float, reason: str, *, found_inf: bool = False) -> None:
        """See `TrainContext.defer_veto_above`."""
        hook = checked_deferrer(self._turn.hook, reason, voting=self.voting)
        self.decision.defer_above(hook, reason, checked_scalar(value, hook), limit, found_inf=found_inf)

    def defer_veto_nonfinite(self, reason: str) -> None:
        """See `TrainContext.defer_veto_nonfinite`."""
        hook = checked_deferrer(self._turn.hook, reason, voting=self.voting)
        self.decision.defer_nonfinite(hook, reason, self._gradients.peaks())

    def note_veto(self, reason: str) -> None:
        """See `TrainContext.note_veto`."""
        self.noted = self._turn.hook, reason

    def veto(self, hook: TrainingUpdateHook) -> None:
        """Count the veto that a hook has returned."""
        noted_by, reason = self.noted
        given = reason if noted_by is hook else ""
        self.decision.vetoes.append(Veto(hook.state_key, given or "returned False"))

    def share(self, value: float | Tensor) -> Shared:
        """See `TrainContext.share`."""
        if self.exchanged:
            raise too_late()
        self.shared = (*self.shared, one := Shared(value))
        return one

    def read_later(self, tensor: Tensor) -> Reading:
        """See `TrainContext.read_later`."""
        for norm, _ in self._gradients.measured:
            if tensor is norm:  # nobody changes it
                return self.decision.read_later(tensor)
        return self.decision.read_later(tensor.detach().clone())  # what it holds now

    def offer_average(
        self,
        averages: Sequence[Tensor],
        live: Sequence[Tensor],
        weight: float,
        accumulators: Sequence[Tensor] | None = None,
    ) -> AverageOffer | None:
        """See `TrainContext.offer_average`."""
        if not self._carrier.executors:
            return None
        self._offers.append(offer := AverageOffer(averages, live, weight, accumulators))
        return offer

    # What the orchestrator does with it.

    def adopt(self, optimizers: Sequence[torch.optim.Optimizer], scaler: Any) -> None:
        """Take over optimizers and scaler as they are now, before anything was computed."""
        self._gradients.adopt(optimizers, scaler)
        self.begun = True

    def follow(self, scaler: Any) -> None:
        """Go on with a scaler that was set after the window began, unless gradients have been unscaled by another."""
        if scaler is not self._gradients.given_scaler:
            self._gradients.follow(scaler)

    def refresh(self) -> None:
        """Forget what was computed: a backward pass has added to the gradients."""
        self._gradients.refresh()

    def begin_voting(self) -> None:
        """Let deferred vetoes count, on gradients as they are now: plain hooks may have changed them."""
        self.voting, self.noted = True, (None, "")
        self._gradients.stop_watching()
        self.exchanged = True

    def reread(self) -> None:
        """Look at ``.grad`` anew, after a hook that may have changed it; found-inf stays what backward left."""
        self._gradients.reread()

    def resolve(self) -> None:
        """Let the host know the vetoes so far, and which gradients are not finite if a scaler has to know."""
        if self._gradients.scaler is not None or self.decision.waits:
            numbers, take = self.ask()
            take(read_together(numbers))

    def ask(self) -> tuple[list[Tensor], Callable[[Sequence[float]], None]]:
        """Return the numbers on which the step depends, and who takes their values once the host knows them."""
        scaler, measured = self._gradients.scaler, []
        numbers, take_deferred = self.decision.ask()
        first = len(numbers)
        divided = self._gradients.chosen() if scaler is not None or self._gradients.normalisers else []
        for gradients in divided:
            if gradients.holds_inf is None and scaler is not None:
                measured.append(gradients)
                numbers.append(gradients.peak())
        second = len(numbers)
        for gradients in divided:
            if gradients.scale is not None and gradients.divisor is not None:
                numbers.append(gradients.pending_product())

        def take(values: Sequence[float]) -> None:
            take_deferred(values)
            for gradients, peak in zip(measured, values[first:second], strict=True):
                gradients.holds_inf = gradients.found_here = not math.isfinite(peak)
            if not all(map(math.isfinite, values[second:])) and not self.decision.vetoes:
                self.decision.vetoes.append(_OVERFLOW)
                self.decision.found_inf = True

        return numbers, take

    def fold(self) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return all vetoes as one flag, and the flag of each optimizer that has gradients; see `folding.fold`."""
        return fold(self.decision, self._gradients)

    def step(self, gradients: OptimizerGradients) -> None:
        """Step one optimizer for certain, on true gradients; one that divides by itself does so in its own pass."""
        self._carrier.step(gradients, self._gradients, self._offers)

    def execute(self, gradients: OptimizerGradients, veto_flag: Tensor, *, alone: bool = False) -> bool:
        """Have an executor step one optimizer under a veto that is still on the device.

        Averages do not go along with a step that may be held back `alone`: they follow whatever steps.
        """
        return self._carrier.execute(gradients, self._gradients, () if alone else self._offers, veto_flag)

    def settle_division(self, gradients: OptimizerGradients) -> None:
        """Note that a step under a veto was taken, so that what was pending is divided out of its gradients."""
        self._carrier.settle_division(gradients, self._gradients)

    def await_outcome(self, veto_flag: Tensor | None, resolve: Callable[[], Any] | None) -> None:
        """Have `resolve` called before anybody looks at gradients again: what they are depends on the outcome."""
        self._flag, self._gradients.before_looking = veto_flag, resolve

    def close(self, found_inf: bool | Tensor | None) -> None:
        """End the window, and the scaler's with it; ending it twice is harmless."""
        if self.closed:
            return
        self.closed = True
        scaler = self._gradients.scaler
        if scaler is not None:
            if found_inf is True:
                for gradients in self._gradients.chosen():
                    if gradients.holds_inf:
                        self._gradients.unscale(gradients)  # so that torch's scaler has a record of the inf
            scaler.close(found_inf)

    def parts(self) -> list[Any]:
        """Return every object that what is known of this window lies in."""
        return [self, self._gradients, self.decision, *self._gradients.everybody]

    def release(self) -> None:
        """Let go of the gradients, for whoever keeps the context of this window."""
        self._gradients.release()
        self.ranks = None
