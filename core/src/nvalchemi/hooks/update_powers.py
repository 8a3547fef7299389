"""What a hook may ask of the update, and ask it to do, through its context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nvalchemi.training.hooks.decision import Reading
    from nvalchemi.training.hooks.pending import PendingStep
    from nvalchemi.training.hooks.plan import AverageOffer
    from nvalchemi.training.hooks.shared import Shared
    from nvalchemi.training.hooks.window import UpdateWindow

__all__ = ["UpdatePowers"]


class UpdatePowers:
    """Gradients, vetoes and numbers of the update at hand; the part of a context that needs an orchestrator."""

    __slots__ = ()

    if TYPE_CHECKING:  # the fields of the context
        models: Mapping[str, nn.Module]
        window: UpdateWindow | None
        pending: PendingStep | None

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The true (unscaled) gradients by parameter name, of every parameter that has one.

        Clipping shows in them once it was divided out: at AFTER_OPTIMIZER_STEP they are what the optimizer used.
        Names are those of the bare models, with the model's name in front when there are several. Look at the tensors,
        do not change them: where a loss scale is pending they are copies.

        Raises
        ------
        RuntimeError
            No orchestrator has seen this batch yet.
        """
        window = self.window or self._no_window("gradients")
        self._resolve()  # after a step, whether they are divided depends on the veto
        return window.named_gradients(self.models)

    @property
    def grad_norm(self) -> Tensor:
        """The global L2 norm of the true gradients before clipping: 0-dim, computed once a window whoever asks.

        Raises
        ------
        RuntimeError
            No orchestrator has seen this batch yet.
        """
        window = self.window or self._no_window("grad_norm")
        if not window.knows_grad_norm:
            self._resolve()
        return window.grad_norm

    @property
    def veto_flag(self) -> Tensor | None:
        """All deferred vetoes in one: float32, 0-dim, exactly 0 or 1 on the device; None once the host knows."""
        return (self.window or self._no_window("veto_flag")).veto_flag

    def defer_veto(self, flag: Tensor, reason: str, *, found_inf: bool = False) -> None:
        """Ask for a veto that is still on the device, from a hook with ``defers_veto``; the hook then returns True.

        Parameters
        ----------
        flag : torch.Tensor
            0-dim, any dtype, on any device. Non-zero or nan vetoes the step.
        reason : str
            Why; it stands in the outcome of the step.
        found_inf : bool
            The flag means that gradients are not finite, so that a loss scaler has to back off.

        Raises
        ------
        HookContractError
            The flag is not a 0-dim tensor, or the hook at work does not declare ``defers_veto``.
        """
        (self.window or self._no_window("defer_veto")).defer_veto(flag, reason, found_inf=found_inf)

    def defer_veto_above(self, value: Tensor, limit: float, reason: str, *, found_inf: bool = False) -> None:
        """Ask for a veto if `value` turns out to be above `limit`, or nan; otherwise as `defer_veto`.

        The comparison costs an operation only where the decision stays on the device.

        Parameters
        ----------
        value : torch.Tensor
            0-dim, floating, at least 0 or nan, and not changed in place afterwards.
        limit : float
            At least 0 and finite; the largest value that is no veto.
        reason, found_inf
            As for `defer_veto`.
        """
        (self.window or self._no_window("defer_veto_above")).defer_veto_above(value, limit, reason, found_inf=found_inf)

    def defer_veto_nonfinite(self, reason: str) -> None:
        """Ask for a veto if any gradient holds an inf or a nan; otherwise as `defer_veto` with ``found_inf=True``.

        It comes out of the norm of the gradients, which is measured once whoever asks.
        """
        (self.window or self._no_window("defer_veto_nonfinite")).defer_veto_nonfinite(reason)

    def offer_average(
        self,
        averages: Sequence[Tensor],
        live: Sequence[Tensor],
        weight: float,
        accumulators: Sequence[Tensor] | None = None,
    ) -> AverageOffer | None:
        """Offer, in ``before_optimizer_step``, an average that an executor may update in the pass of the step.

        Parameters
        ----------
        averages, live, weight, accumulators
            See `nvalchemi.training.hooks.AverageOffer`.

        Returns
        -------
        AverageOffer or None
            Whether it was taken stands in ``taken`` from ``after_optimizer_step`` on; if it was not, the hook averages
            by itself. None where no hook brings an executor, so that nobody would take it.
        """
        return (self.window or self._no_window("offer_average")).offer_average(averages, live, weight, accumulators)

    def note_veto(self, reason: str) -> None:
        """Give the reason of the veto that the hook at work is about to return."""
        (self.window or self._no_window("note_veto")).note_veto(reason)

    def share(self, value: float | Tensor) -> Shared:
        """Have a number added up over all ranks, in the one message that they exchange at the step anyway.

        Every rank shares the same numbers in the same order, from BEFORE_BATCH (once an orchestrator has seen it)
        until hooks decide on the step. In one process nothing is sent.

        Parameters
        ----------
        value : float or torch.Tensor
            A number, or a 0-dim tensor, which is copied as it is now.

        Returns
        -------
        Shared
            Its ``total`` and ``mean`` are 0-dim tensors, to be read in ``before_optimizer_step`` or later. A window of
            several batches keeps what each of them has shared.

        Raises
        ------
        HookContractError
            It is no number, or the ranks have exchanged theirs for this step.
        RuntimeError
            No orchestrator has seen this batch yet.
        """
        return (self.window or self._no_window("share")).share(value)

    def read_later(self, tensor: Tensor) -> Reading:
        """Have a 0-dim tensor read with the one host read of the step, instead of in a read of its own.

        Parameters
        ----------
        tensor : torch.Tensor
            0-dim, any dtype.

        Returns
        -------
        Reading
            Its ``value`` is a float, known at ``settled`` at the latest; asked earlier, it waits for the device.
        """
        return (self.window or self._no_window("read_later")).read_later(tensor)

    def _resolve(self) -> None:
        if self.pending is not None:
            self.pending.resolve()

    def _no_window(self, asked: str) -> NoReturn:
        raise RuntimeError(
            f"ctx.{asked} was asked before an orchestrator saw this batch, so there is no update to ask about; "
            "call the orchestrator at TrainingStage.BEFORE_BATCH first."
        )
