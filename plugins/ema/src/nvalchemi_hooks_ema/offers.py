"""Which parts of an average may be updated along with the weights, by whoever carries out the optimizers' steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from nvalchemi_hooks_ema.pairing import Pair

if TYPE_CHECKING:
    from nvalchemi.hooks import TrainContext
    from nvalchemi.training.hooks import AverageOffer

__all__ = ["Offered", "make_offers", "taken_names"]


class Offered(NamedTuple):
    """An offer that was made, and the names of the pairs in it."""

    offer: AverageOffer
    names: frozenset[str]


def make_offers(
    ctx: TrainContext, pairs: Iterable[Pair], accumulators: Mapping[str, Tensor], weight: float
) -> list[Offered]:
    """Offer the averages of parameters that are about to be stepped: one offer an optimizer, device and dtype.

    Buffers are no part of an offer, nor is a parameter that no optimizer holds or that has no gradient: no step will
    touch them. The hook sees to them by itself, and to every offer that is not taken.

    Parameters
    ----------
    ctx : nvalchemi.hooks.TrainContext
        At ``before_optimizer_step``.
    pairs : iterable of Pair
        All that is averaged.
    accumulators : mapping of str to torch.Tensor
        float32 averages of pairs in low precision, by name.
    weight : float
        1 - decay.
    """
    owners = _owners(ctx.window.optimizers if ctx.window is not None else ())
    groups: dict[tuple[int, torch.device, torch.dtype], list[Pair]] = {}
    for pair in pairs:
        owner = owners.get(id(pair.live))
        if owner is not None and pair.blended and isinstance(pair.live, nn.Parameter):
            groups.setdefault((owner, pair.live.device, pair.live.dtype), []).append(pair)
    offered = []
    for group in groups.values():
        wide = [accumulators[pair.name] for pair in group if pair.name in accumulators]
        averages, live = [pair.average for pair in group], [pair.live for pair in group]
        offer = ctx.offer_average(averages, live, weight, wide or None)
        if offer is not None:
            offered.append(Offered(offer, frozenset(pair.name for pair in group)))
    return offered


def taken_names(offered: Sequence[Offered]) -> frozenset[str]:
    """Return the names of the pairs that were averaged along with a step."""
    return frozenset().union(*(names for offer, names in offered if offer.taken))


def _owners(optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, int]:
    """Return which optimizer, by its place, is going to step a parameter, by its id."""
    return {
        id(parameter): place
        for place, optimizer in enumerate(optimizers)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    }
