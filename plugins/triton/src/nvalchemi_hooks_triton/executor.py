"""Who carries out the step of an optimizer in one pass, if it is one of the steps that the programs know."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from nvalchemi_hooks_triton import kernels
from nvalchemi_hooks_triton.sorting import CannotTakeError, Work, sorted_into_batches, takeable_offers

if TYPE_CHECKING:
    import torch

    from nvalchemi.training.hooks import AverageOffer, OptimizerPlan

__all__ = ["OnePassExecutor"]


class OnePassExecutor:
    """An `nvalchemi.hooks.UpdateExecutor` on Triton: division, AdamW, veto and average in one pass over memory.

    It takes a plan whole or leaves it untouched.

    Examples
    --------
    >>> import torch
    >>> from nvalchemi.training.hooks import OptimizerPlan
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> plan = OptimizerPlan(torch.optim.SGD([weight], lr=0.1), [weight])
    >>> OnePassExecutor().execute(plan)
    False
    >>> OnePassExecutor().describe(plan)
    'left to others: SGD is not Adam or AdamW'
    """

    def __init__(self) -> None:
        self._tables: WeakKeyDictionary[torch.optim.Optimizer, dict[Hashable, kernels.Tables]] = WeakKeyDictionary()

    def execute(self, plan: OptimizerPlan) -> bool:
        """Do the step and return True, or return False with nothing touched.

        Gradients are read, not written: what a plan divides out stays in ``.grad``.

        Raises
        ------
        ImportError
            The tensors are where the programs run, but triton cannot be imported.
        """
        try:
            work, offers = self._prepare(plan)
        except CannotTakeError:
            return False
        for one in work:
            tables = self._tables_of(plan, one)
            kernels.update_(one.batch, one.rule, tables, divisor=plan.divisor, veto=plan.veto_flag)
        for offer in offers:
            offer.taken = True
        return True

    def describe(self, plan: OptimizerPlan) -> str:
        """Say what `execute` would do with a plan, and why; nothing is touched."""
        try:
            work, offers = self._prepare(plan)
        except CannotTakeError as reason:
            return f"left to others: {reason}"
        return f"one pass, in {len(work)} batches, with {len(offers)} of {len(plan.averages)} averages"

    def __getstate__(self) -> dict[str, Any]:
        """Leave the tables out: they hold addresses of this process."""
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._tables = WeakKeyDictionary()

    def _prepare(self, plan: OptimizerPlan) -> tuple[list[Work], list[AverageOffer]]:
        offers = takeable_offers(plan)
        work = sorted_into_batches(plan, offers)
        obstacle = kernels.obstacle(plan.parameters[0].device)
        if obstacle:
            raise CannotTakeError(obstacle)
        if not all(kernels.can_launch(one.batch, one.rule, self._tables_of(plan, one)) for one in work):
            raise CannotTakeError("a CUDA graph is being captured; take a step like this one before that")
        return work, offers

    def _tables_of(self, plan: OptimizerPlan, work: Work) -> kernels.Tables:
        mine = self._tables.setdefault(plan.optimizer, {})
        if work.key not in mine:
            mine[work.key] = kernels.Tables(plan.parameters[0].device)
        return mine[work.key]
