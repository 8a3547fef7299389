"""Norms of gradients that are spread over ranks: what each rank contributes, and how it is put together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from nvalchemi.errors import HookContractError
from nvalchemi.training.sharding import is_sharded

__all__ = ["from_total", "over_ranks", "share_of", "total_of"]

_TOO_EARLY = (
    "The norm of gradients that are spread over ranks was asked for outside the optimizer step, where it would take "
    "a message that not every rank may send; ask in before_optimizer_step, or, for ctx.grad_norm, at "
    "AFTER_OPTIMIZER_STEP."
)


def share_of(tensor: Tensor) -> float:
    """Return what an element on this rank counts in a sum over all ranks: 1 over the number of ranks that hold it.

    Examples
    --------
    >>> share_of(torch.zeros(2))
    1.0
    """
    world = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    if not is_sharded(tensor):
        return 1.0 / world
    parts = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if placement.is_partial():
            raise HookContractError(
                f"A gradient is spread as {tensor.placements}: its parts have not been added up over the ranks; reduce "
                "gradients in the backward pass, as fully_shard does."
            )
        parts *= size if placement.is_shard() else 1
    return parts / world


def total_of(norms: Sequence[tuple[float, Tensor]], kind: float, device: torch.device) -> Tensor:
    """Return what this rank adds to the `kind`-th power of a norm: float64, 0-dim.

    Parameters
    ----------
    norms : sequence of (float, torch.Tensor)
        Norms of parts, each with its share.
    kind : float
        The order, above 0 and finite.
    device : torch.device
        Where the number is wanted.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for share, norm in norms:
        total = total + norm.to(device, torch.float64).pow(kind) * share
    return total


def from_total(total: Tensor, kind: float) -> Tensor:
    """Return the norm whose `kind`-th power is known."""
    return total.sqrt() if kind == 2.0 else total.pow(1.0 / kind)


def over_ranks(norms: Sequence[tuple[float, Tensor]], kind: float, device: torch.device, *, asking: bool) -> Tensor:
    """Return a norm in a message of its own, which every rank has to enter; alone, a rank sends nothing.

    Raises
    ------
    HookContractError
        Not every rank can be relied on to ask now (`asking` is False), or no order of a norm is meant.
    """
    alone = distributed.get_world_size() == 1
    if not (asking or alone):
        raise HookContractError(_TOO_EARLY)
    if not kind > 0:
        raise HookContractError(
            f"The norm of order {kind} of gradients that are spread over ranks is not defined here."
        )
    where = device if distributed.get_backend() == "nccl" else torch.device("cpu")
    operation: Any
    if math.isinf(kind):
        operation, total = distributed.ReduceOp.MAX, torch.zeros((), dtype=torch.float64, device=where)
        for _, norm in norms:
            total = torch.maximum(total, norm.to(where, torch.float64))  # nan stays nan
        # A maximum over ranks may lose a nan, so that it travels as an inf.
        total = total.nan_to_num(nan=math.inf)
    else:
        operation, total = distributed.ReduceOp.SUM, total_of(norms, kind, where)
    if not alone:
        distributed.all_reduce(total, op=operation)
    return (total if math.isinf(kind) else from_total(total, kind)).to(device)
