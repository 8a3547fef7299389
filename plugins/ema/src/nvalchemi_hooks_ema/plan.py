"""One update of the average, prepared for as long as both models hold the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor, nn

from nvalchemi_hooks_ema import kernels
from nvalchemi_hooks_ema.fingerprint import Fingerprint
from nvalchemi_hooks_ema.pairing import Pair

__all__ = ["Plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is called in an update, and what has to stay the same for it.

    Attributes
    ----------
    copying : list of callables
        The first update: every average becomes a copy of its live tensor.
    blending : list of callables
        The following ones: averages move towards their live tensors; what cannot be averaged is copied.
    rounded : list of (accumulator, average)
        The averages that are rounded accumulators.
    """

    source: nn.Module
    live: Fingerprint
    first_average: Tensor
    address: int
    copying: list[Callable[[], None]]
    blending: list[Callable[[], None]]
    rounded: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(
        cls,
        source: nn.Module,
        averaged: nn.Module,
        pairs: Sequence[Pair],
        accumulators: Mapping[str, Tensor],
        weight: float,
    ) -> Self:
        """Prepare the update of paired tensors.

        Parameters
        ----------
        source, averaged : torch.nn.Module
            The live model and the averaged one.
        pairs : sequence of Pair
            Their tensors, in line with each other in device and dtype.
        accumulators : mapping of str to torch.Tensor
            The float32 averages of those pairs that are in low precision, by name.
        weight : float
            1 - decay.
        """
        low = [(accumulators[pair.name], pair.average, pair.live) for pair in pairs if pair.name in accumulators]
        full = [(pair.average, pair.live) for pair in pairs if pair.blended and pair.name not in accumulators]
        copied = [(pair.average, pair.live) for pair in pairs if not pair.blended]
        first = next(averaged.parameters())
        return cls(
            source=source,
            live=Fingerprint(source),
            first_average=first,
            address=first.data_ptr(),
            copying=kernels.copying(
                [
                    *((pair.average, pair.live) for pair in pairs),
                    *((accumulator, live) for accumulator, _, live in low),
                ]
            ),
            blending=[
                *kernels.blending(full, weight),
                *kernels.blending_rounded(low, weight),
                *kernels.copying(copied),
            ],
            rounded=[(accumulator, average) for accumulator, average, _ in low],
        )

    def fits(self, source: nn.Module, averaged: nn.Module) -> bool:
        """Return whether both models still hold the same tensors, without waiting for a device."""
        # The averaged model is moved or replaced as a whole or not at all, so one tensor of it is enough to look at.
        first = next(averaged.parameters())
        return (
            source is self.source
            and first is self.first_average
            and first.data_ptr() == self.address
            and self.live.holds()
        )
