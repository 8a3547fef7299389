"""Who carries out the step of one optimizer: executors that hooks bring, the core's own, or the optimizer itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nvalchemi.training.hooks.executor import StockExecutor, code_around_step, nobody_around, why_not_folded
from nvalchemi.training.hooks.plan import AverageOffer, OptimizerPlan

if TYPE_CHECKING:
    from nvalchemi.hooks.protocols import UpdateExecutor
    from nvalchemi.training.hooks.gradients import OptimizerGradients
    from nvalchemi.training.hooks.window_gradients import WindowGradients

__all__ = ["Carrier"]


class Carrier:
    """Steps optimizers, window after window, with the lists that its executors keep.

    Parameters
    ----------
    executors : sequence of UpdateExecutor
        Who is asked to carry out a step, in this order, before the core's own.
    """

    def __init__(self, executors: Sequence[UpdateExecutor] = ()) -> None:
        self.executors = tuple(executors)
        self._stock = StockExecutor()

    def step(self, gradients: OptimizerGradients, among: WindowGradients, offers: Sequence[AverageOffer]) -> None:
        """Step one optimizer for certain, on true gradients; one that divides by itself does so in its own pass.

        Parameters
        ----------
        gradients : OptimizerGradients
            Its gradients.
        among : WindowGradients
            Those of all optimizers.
        offers : sequence of AverageOffer
            What may be averaged along.
        """
        if self.execute(gradients, among, offers, None):
            return
        among.unscale(gradients)
        gradients.materialise()
        if among.scaler is None:
            gradients.optimizer.step()
        else:
            among.scaler.step(gradients.optimizer)

    def execute(
        self,
        gradients: OptimizerGradients,
        among: WindowGradients,
        offers: Sequence[AverageOffer],
        veto_flag: Tensor | None,
    ) -> bool:
        """Have an executor step one optimizer, under a veto that is still on the device or none at all."""
        optimizer, pending = gradients.optimizer, gradients.pending()
        if among.scaler is not None and not among.scaler.folds:
            obstacle = "the scaler unscales by itself"
        elif not (obstacle := code_around_step(optimizer)):
            divisor = None if pending is None else pending.to(torch.float32)
            flag = veto_flag if veto_flag is None else veto_flag.to(gradients.device)
            plan = OptimizerPlan(optimizer, gradients.with_grad, divisor, flag, tuple(offers))
            others = self.executors if nobody_around(optimizer) else ()
            for executor in (*others, self._stock):
                if executor.execute(plan):
                    gradients.left_undivided = executor is not self._stock
                    by = "" if executor is self._stock else f" by {type(executor).__name__}"
                    gradients.division = f"folded{by}" if by or pending is not None else ""
                    if veto_flag is None:
                        self.settle_division(gradients, among)
                    return True
            obstacle = why_not_folded(optimizer, gradients.tensors)
        gradients.division = f"plain: {obstacle}" if pending is not None else ""
        return False

    def settle_division(self, gradients: OptimizerGradients, among: WindowGradients) -> None:
        """Note that the step of one optimizer has divided what was pending out of its gradients, if it writes them."""
        if gradients.left_undivided:
            return
        among.unscaled |= among.scaler is not None
        gradients.settle_division()
