"""Who carries out the step of an optimizer in one pass, if it is one of the steps that the programs know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from nvalchemi_hooks_triton import kernels
from nvalchemi_hooks_triton.memory import Memory
from nvalchemi_hooks_triton.sorting import CannotTakeError, Work, check_operands

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
        self._memories: WeakKeyDictionary[torch.optim.Optimizer, Memory] = WeakKeyDictionary()

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
            tables = self._memories[plan.optimizer].tables(one)
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
        """Leave out what is kept: it belongs to this process."""
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._memories = WeakKeyDictionary()

    def _prepare(self, plan: OptimizerPlan) -> tuple[list[Work], list[AverageOffer]]:
        memory = self._memories.setdefault(plan.optimizer, Memory())
        work, offers = memory.recall(plan) or memory.learn(plan)
        check_operands(plan)
        obstacle = kernels.obstacle(plan.parameters[0].device)
        if obstacle:
            raise CannotTakeError(obstacle)
        if not all(kernels.can_launch(one.batch, one.rule, memory.tables(one)) for one in work):
            raise CannotTakeError("a CUDA graph is being captured; take a step like this one before that")
        return work, offers
