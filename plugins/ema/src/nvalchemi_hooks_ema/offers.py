"""Which parts of an average may be updated along with the weights, by whoever carries out the optimizers' steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nvalchemi_hooks_ema.pairing import Pair

if TYPE_CHECKING:
    from nvalchemi.hooks import TrainContext
    from nvalchemi.training.hooks import AverageOffer

__all__ = ["Offered", "Offers", "taken_names", "wants_offers"]

_grad = attrgetter("grad")


class Offered(NamedTuple):
    """An offer that was made, and the names of the pairs in it."""

    offer: AverageOffer
    names: frozenset[str]


class _Group(NamedTuple):
    """What one offer holds."""

    averages: list[Tensor]
    live: list[Tensor]
    accumulators: list[Tensor] | None
    names: frozenset[str]


class Offers:
    """The offers of an average: one for each optimizer, device and dtype.

    Buffers are no part of an offer, nor is a parameter that no optimizer holds or that has no gradient: no step will
    touch them. The hook sees to them by itself, and to every offer that is not taken.

    Parameters
    ----------
    pairs : iterable of Pair
        All that is averaged.
    accumulators : mapping of str to torch.Tensor
        float32 averages of pairs in low precision, by name.
    weight : float
        1 - decay.
    """

    def __init__(self, pairs: Iterable[Pair], accumulators: Mapping[str, Tensor], weight: float) -> None:
        self._pairs = [pair for pair in pairs if pair.blended]
        self._accumulators = accumulators
        self._weight = weight
        self._groups: list[_Group] = []
        self._grouped_for: object = None

    def make(self, ctx: TrainContext) -> list[Offered]:
        """Make the offers, at ``before_optimizer_step``; they are grouped anew when other parameters have gradients."""
        optimizers = ctx.window.optimizers if ctx.window is not None else ()
        without = tuple(map(is_, map(_grad, [pair.live for pair in self._pairs]), repeat(None)))
        key = tuple(map(id, optimizers)), without
        if key != self._grouped_for:
            self._groups, self._grouped_for = list(self._grouped(optimizers)), key
        offers = [ctx.offer_average(g.averages, g.live, self._weight, g.accumulators) for g in self._groups]
        made = zip(offers, self._groups, strict=True)
        return [Offered(offer, group.names) for offer, group in made if offer is not None]

    def _grouped(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterable[_Group]:
        owners = _owners(optimizers)
        groups: dict[tuple[int, torch.device, torch.dtype], list[Pair]] = {}
        for pair in self._pairs:
            if id(pair.live) in owners:
                groups.setdefault((owners[id(pair.live)], pair.live.device, pair.live.dtype), []).append(pair)
        for group in groups.values():
            averages, live = [pair.average for pair in group], [pair.live for pair in group]
            wide = [self._accumulators[pair.name] for pair in group if pair.name in self._accumulators]
            yield _Group(averages, live, wide or None, frozenset(pair.name for pair in group))


def wants_offers(ctx: TrainContext) -> bool:
    """Return whether anybody would take an offer, by making one of nothing: lists are looked at only for a taker."""
    return ctx.window is not None and ctx.offer_average((), (), 0.0) is not None


def taken_names(offered: Sequence[Offered]) -> frozenset[str]:
    """Return the names of the pairs that were averaged along with a step."""
    taken = [names for offer, names in offered if offer.taken]
    return taken[0] if len(taken) == 1 else frozenset().union(*taken)


def _owners(optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, int]:
    """Return which optimizer, by its place, is going to step a parameter, by its id."""
    return {
        id(parameter): place
        for place, optimizer in enumerate(optimizers)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    }
