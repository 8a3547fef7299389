"""AdamW, division, veto and moving average in one pass over memory: from lists of tensors to launches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from nvalchemi_hooks_triton.kernels.loading import programs
from nvalchemi_hooks_triton.kernels.tables import CHUNK, Tables, addresses

__all__ = ["KINDS", "Batch", "Rule", "can_launch", "update_"]

KINDS = (torch.float32, torch.bfloat16, torch.float16)  # of weights and moments
_COUNTERS = 128  # step counters a program moves
_WARPS = 4


@dataclass(frozen=True, slots=True)
class Rule:
    """How a batch is to be stepped: the arguments of `torch.optim.AdamW`, or of Adam if the decay is not decoupled."""

    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool = True
    maximize: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors that are updated together: of one device, dense, contiguous, those of a row of one shape.

    Attributes
    ----------
    weights, gradients, firsts, seconds : list of torch.Tensor
        Weights, their gradients and both moments; all of one dtype: float32, bfloat16 or float16.
    steps : list of torch.Tensor
        Step counters: 0-dim, float32, on the same device.
    averages : list of torch.Tensor, optional
        Moving averages, float32.
    rounded : list of torch.Tensor, optional
        Copies of the averages in the dtype of the weights.
    share : float
        1 - decay of the average.
    """

    weights: list[Tensor]
    gradients: list[Tensor]
    firsts: list[Tensor]
    seconds: list[Tensor]
    steps: list[Tensor]
    averages: list[Tensor] | None = None
    rounded: list[Tensor] | None = None
    share: float = 0.0


def update_(
    batch: Batch, rule: Rule, tables: Tables, *, divisor: Tensor | None = None, veto: Tensor | None = None
) -> None:
    """Update everything in `batch` in place, as ``torch.optim.AdamW(fused=True)`` and a lerp after it would.

    Two launches for any number of tensors: the step counters, then the pass over memory. Under a CUDA graph's capture
    the addresses of gradients cannot be uploaded, so that each tensor has a launch of its own. Gradients are only read:
    what is divided out of them is not written back.

    Parameters
    ----------
    batch : Batch
        The tensors.
    rule : Rule
        The rule; `lr` may be a 0-dim tensor on the same device, which the host does not read.
    tables : Tables
        Kept from step to step, one for each batch.
    divisor : torch.Tensor, optional
        0-dim, floating, on the same device: loss scale times clipping factor.
    veto : torch.Tensor, optional
        0-dim, float32, exactly 0 or 1: 1 leaves everything as it is, bit for bit.

    Examples
    --------
    Runs on CPU tensors only under ``TRITON_INTERPRET=1``; `nvalchemi_hooks_triton.kernels.obstacle` tells.

    >>> Rule(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01).decoupled
    True
    """
    device = batch.weights[0].device
    with _on(device):
        scalars = _advance(batch, rule, tables, veto)
        if _capturing(device):
            tables.keep()
            _update_one_by_one(batch, rule, scalars, divisor, veto)
        else:
            _update_together(batch, rule, tables, scalars, divisor, veto)
    written = (batch.weights, batch.firsts, batch.seconds, batch.steps, batch.averages, batch.rounded)
    increment_version([tensor for column in written if column is not None for tensor in column])


def can_launch(batch: Batch, rule: Rule, tables: Tables) -> bool:
    """Return whether everything is there that cannot be uploaded now, because a CUDA graph is being captured."""
    if not _capturing(batch.weights[0].device):
        return True
    count = len(batch.steps)
    there = ("steps", addresses(batch.steps)), ("betas", rule.betas), ("scratch", (count,))
    return all(tables.holds(name, key) for name, key in there)


def _advance(batch: Batch, rule: Rule, tables: Tables, veto: Tensor | None) -> Tensor:
    count = len(batch.steps)
    scalars = tables.scratch(count)
    programs().advance[(-(-count // _COUNTERS),)](
        tables.integers("steps", addresses(batch.steps)),
        scalars,
        tables.log_betas(rule.betas),
        rule.lr,
        rule.weight_decay,
        scalars if veto is None else veto,
        count,
        LR_ON_DEVICE=isinstance(rule.lr, Tensor),
        HAS_VETO=veto is not None,
        BLOCK=_COUNTERS,
        num_warps=_WARPS,
    )
    return scalars


def _update_together(
    batch: Batch, rule: Rule, tables: Tables, scalars: Tensor, divisor: Tensor | None, veto: Tensor | None
) -> None:
    sizes = tuple(weight.numel() for weight in batch.weights)
    chunks = tables.chunks(sizes)
    programs().update_many[(chunks.numel() // 2,)](
        tables.integers("tensors", tuple(n for column in _columns(batch) for n in addresses(column)) + sizes),
        tables.integers("gradients", addresses(batch.gradients)),
        chunks,
        *_operands(batch, rule, scalars, divisor, veto),
        **_switches(batch, rule, divisor, veto),
    )


def _update_one_by_one(batch: Batch, rule: Rule, scalars: Tensor, divisor: Tensor | None, veto: Tensor | None) -> None:
    operands, switches = _operands(batch, rule, scalars, divisor, veto), _switches(batch, rule, divisor, veto)
    rows = zip(*(addresses(column) for column in (*_columns(batch), batch.gradients)), strict=True)
    for place, (row, weight) in enumerate(zip(rows, batch.weights, strict=True)):
        size = weight.numel()
        programs().update_one[(-(-size // CHUNK),)](*row, place, size, *operands, **switches)


def _columns(batch: Batch) -> tuple[Sequence[Tensor], ...]:
    averages = batch.averages or batch.weights  # what there is not is not read either
    return batch.weights, batch.firsts, batch.seconds, averages, batch.rounded or batch.weights


def _operands(batch: Batch, rule: Rule, scalars: Tensor, divisor: Tensor | None, veto: Tensor | None) -> list[Any]:
    beta1, beta2 = rule.betas
    return [
        scalars,
        scalars if divisor is None else divisor,
        scalars if veto is None else veto,
        len(batch.weights),
        beta1,
        1.0 - beta1,  # in double precision: 1 - 0.999 in float32 is off by 1e-5
        beta2,
        1.0 - beta2,
        rule.eps,
        rule.weight_decay,
        batch.share,
    ]


def _switches(batch: Batch, rule: Rule, divisor: Tensor | None, veto: Tensor | None) -> dict[str, Any]:
    kind = programs().KINDS[batch.weights[0].dtype]
    return {
        "KIND": kind,
        "HAS_DIVISOR": divisor is not None,
        "HAS_VETO": veto is not None,
        "MAXIMIZE": rule.maximize,
        "DECOUPLED": rule.decoupled,
        "AVERAGES": batch.averages is not None,
        "ROUNDS": batch.rounded is not None,
        "CHUNK": CHUNK,
        **block_sizes(batch.weights[0].dtype),
    }


def block_sizes(dtype: torch.dtype) -> dict[str, int]:
    """Return what a program does at once: 16 bytes of a weight a thread where they are aligned, else one element.

    Examples
    --------
    >>> block_sizes(torch.float32)
    {'BLOCK': 512, 'TAIL': 128, 'num_warps': 4, 'num_stages': 1}
    """
    threads = 32 * _WARPS
    return {"BLOCK": threads * (16 // dtype.itemsize), "TAIL": threads, "num_warps": _WARPS, "num_stages": 1}


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
