"""What one optimizer's step should be: the plan that an executor carries out, and the averages that go along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["AverageOffer", "OptimizerPlan"]


@dataclass(slots=True, eq=False)
class AverageOffer:
    """An average that may be updated in the same pass as the weights: ``average += weight * (live - average)``.

    Parameters
    ----------
    averages, live : sequence of torch.Tensor
        Pairs of equal shape, on the device of the weights. `live` holds parameters as they are *after* the step.
    weight : float
        How much of the live value goes in: 1 minus the decay.
    accumulators : sequence of torch.Tensor, optional
        float32, one a pair: what is really averaged where weights are bf16 or fp16, of which `averages` holds the
        rounded value.
    taken : bool
        An executor sets it when it has updated *all* pairs, under the veto of the step.
    """

    averages: Sequence[Tensor]
    live: Sequence[Tensor]
    weight: float
    accumulators: Sequence[Tensor] | None = None
    taken: bool = False


class OptimizerPlan(NamedTuple):
    """One optimizer's step, as the hooks have agreed on it.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Whose step it is; settings and state are read from it at every call.
    parameters : sequence of torch.Tensor
        Those that have a gradient, group by group. The same list as before, while nothing about them has changed.
    divisor : torch.Tensor, optional
        0-dim float32 on the device of the gradients: what is to be divided out of ``.grad``, loss scale and clipping in
        one. None: gradients are true as they lie there.
    veto_flag : torch.Tensor, optional
        0-dim float32, exactly 0 or 1: with 1 weights, state, step counters and averages stay as they are, bit for bit.
        None: the host knows, and there is no veto.
    averages : tuple of AverageOffer
        What may be averaged along. Only offers whose `live` are parameters of this optimizer can be taken.
    """

    optimizer: torch.optim.Optimizer
    parameters: Sequence[Tensor]
    divisor: Tensor | None = None
    veto_flag: Tensor | None = None
    averages: tuple[AverageOffer, ...] = ()
