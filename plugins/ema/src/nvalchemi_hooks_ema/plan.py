"""The updates of an average, prepared for as long as both models hold the same tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from nvalchemi.training import is_sharded, local_part
from nvalchemi_hooks_ema import kernels
from nvalchemi_hooks_ema.fingerprint import Fingerprint
from nvalchemi_hooks_ema.offers import Offers
from nvalchemi_hooks_ema.pairing import Pair

__all__ = ["Plan"]

_NOTHING: frozenset[str] = frozenset()


class Plan:
    """What is called in an update, and what has to stay the same for it.

    Parameters
    ----------
    source, averaged : torch.nn.Module
        The live model and the averaged one.
    pairs : sequence of Pair
        Their tensors, in line with each other in device and dtype. Of those that are spread over ranks the parts that
        this rank holds are averaged.
    accumulators : mapping of str to torch.Tensor
        The float32 averages of those pairs that are in low precision, by name.
    weight : float
        1 - decay.

    Attributes
    ----------
    copying : list of Call
        The first update: every average becomes a copy of its live tensor.
    offers : Offers
        What whoever carries out a step may average along.
    rounded, rounded_averages : list of (name, accumulator, average), list of torch.Tensor
        The averages that are rounded accumulators.
    """

    def __init__(
        self,
        source: nn.Module,
        averaged: nn.Module,
        pairs: Sequence[Pair],
        accumulators: Mapping[str, Tensor],
        weight: float,
    ) -> None:
        self.offers = Offers([pair for pair in pairs if not is_sharded(pair.live)], accumulators, weight)
        pairs = [_local(pair) for pair in pairs]
        accumulators = {name: local_part(accumulator) for name, accumulator in accumulators.items()}
        low = [(pair.name, accumulators[pair.name], pair) for pair in pairs if pair.name in accumulators]
        self.rounded = [(name, accumulator, pair.average) for name, accumulator, pair in low]
        self.rounded_averages = [average for _, _, average in self.rounded]
        copied = [(pair.average, pair.live) for pair in pairs]
        self.copying = kernels.copying([*copied, *((accumulator, pair.live) for _, accumulator, pair in low)])
        self._pairs = pairs
        self._accumulators = accumulators
        self._weight = weight
        self._blending: dict[frozenset[str], list[kernels.Call]] = {}
        self._source, self._averaged = source, averaged
        self._live = Fingerprint(source.modules())
        # The averaged model is moved or replaced as a whole or not at all, so one tensor of it is enough to look at.
        self._average = Fingerprint.of_first_parameter(averaged)

    def blending(self, without: frozenset[str] = _NOTHING) -> list[kernels.Call]:
        """Return the calls of every other update: averages move, and what cannot be averaged is copied.

        Parameters
        ----------
        without : frozenset of str
            The names of pairs that somebody else has seen to.
        """
        if without not in self._blending:
            self._blending[without] = self._prepared([pair for pair in self._pairs if pair.name not in without])
        return self._blending[without]

    def fits(self, source: nn.Module, averaged: nn.Module) -> bool:
        """Return whether both models still hold the same tensors, without waiting for a device."""
        return source is self._source and averaged is self._averaged and self._average.holds() and self._live.holds()

    def _prepared(self, pairs: Collection[Pair]) -> list[kernels.Call]:
        low: list[tuple[Tensor, Tensor, Tensor]] = []
        full: list[tuple[Tensor, Tensor]] = []
        copied: list[tuple[Tensor, Tensor]] = []
        for pair in pairs:
            if pair.name in self._accumulators:
                low.append((self._accumulators[pair.name], pair.average, pair.live))
            else:
                (full if pair.blended else copied).append((pair.average, pair.live))
        return [
            *kernels.blending(full, self._weight),
            *kernels.blending_rounded(low, self._weight),
            *kernels.copying(copied),
        ]


def _local(pair: Pair) -> Pair:
    return (
        replace(pair, average=local_part(pair.average), live=local_part(pair.live)) if is_sharded(pair.live) else pair
    )
