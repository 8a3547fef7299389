"""What is remembered of an optimizer's last step, so that nothing is sorted anew in a step that did not change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nvalchemi_hooks_triton.kernels import Tables, addresses
from nvalchemi_hooks_triton.sorting import Work, check_gradients, rule_of, sorted_into_batches, takeable_offers

if TYPE_CHECKING:
    from nvalchemi.training.hooks import AverageOffer, OptimizerPlan

__all__ = ["Memory"]

_NO_STATE: dict[str, Tensor] = {}


class Memory:
    """The batches of one optimizer, with their tables.

    They are used again only if every weight, moment, counter and average is the same tensor at the same address: what
    the programs are given are bare addresses. Settings and gradients are looked at anew in every step.
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[int, torch.dtype, int | None], Tables] = {}
        self._work: list[Work] = []
        self._taken: list[int] = []  # the places of the offers that go along
        self._seen: list[Any] = []
        self._addresses: tuple[int, ...] = ()

    def recall(self, plan: OptimizerPlan) -> tuple[list[Work], list[AverageOffer]] | None:
        """Return the work and the offers of this step if they are those of the last one, else None.

        Raises
        ------
        CannotTakeError
            Settings or gradients have become what the programs do not know.
        """
        seen = _what_there_is(plan)
        if not self._work or len(seen) != len(self._seen) or not all(map(is_, seen, self._seen)):
            return None
        if _addresses_of(self._work) != self._addresses:
            return None
        offers = [plan.averages[place] for place in self._taken]
        return [_renewed(one, plan, offers) for one in self._work], offers

    def learn(self, plan: OptimizerPlan) -> tuple[list[Work], list[AverageOffer]]:
        """Sort out a step, and remember it.

        Raises
        ------
        CannotTakeError
            There is something in the plan that the programs do not know.
        """
        self._work = []
        offers = takeable_offers(plan)
        self._work = sorted_into_batches(plan, offers)
        self._taken = [place for place, offer in enumerate(plan.averages) if any(offer is one for one in offers)]
        self._seen, self._addresses = _what_there_is(plan), _addresses_of(self._work)
        return self._work, offers

    def tables(self, work: Work) -> Tables:
        """Return the tables of a batch, which outlast its being sorted anew."""
        key = work.group, work.dtype, work.offer
        if key not in self._tables:
            self._tables[key] = Tables(work.batch.weights[0].device)
        return self._tables[key]


def _what_there_is(plan: OptimizerPlan) -> list[Any]:
    """Return every object on which the sorting of a plan depends, gradients apart, with None between lists."""
    optimizer = plan.optimizer
    states = [optimizer.state.get(parameter, _NO_STATE) for parameter in plan.parameters]
    groups = chain.from_iterable((*group["params"], None) for group in optimizer.param_groups)
    offers = chain.from_iterable((*one.live, *one.averages, *(one.accumulators or ()), None) for one in plan.averages)
    moments = ([state.get(name) for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
    return [*plan.parameters, None, *groups, None, *offers, None, *chain.from_iterable(moments)]


def _addresses_of(work: Iterable[Work]) -> tuple[int, ...]:
    columns: Iterable[Sequence[Tensor] | None] = chain.from_iterable(
        (b.weights, b.firsts, b.seconds, b.steps, b.averages, b.rounded) for b in (one.batch for one in work)
    )
    return tuple(chain.from_iterable(addresses(column) for column in columns if column is not None))


def _renewed(work: Work, plan: OptimizerPlan, offers: Sequence[AverageOffer]) -> Work:
    gradients: list[Any] = [weight.grad for weight in work.batch.weights]
    share = 0.0 if work.offer is None else offers[work.offer].weight
    batch = replace(work.batch, gradients=gradients, share=share)
    check_gradients(batch)
    return work._replace(batch=batch, rule=rule_of(plan.optimizer.param_groups[work.group], gradients[0].device))
