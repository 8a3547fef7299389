"""Optimizers, schedulers and scaler: one attempt to step them, and one report of what happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from nvalchemi.hooks.context import TrainContext
from nvalchemi.training.hooks.decision import Veto
from nvalchemi.training.hooks.window import UpdateWindow

__all__ = ["OptimizerOutcome", "StepOutcome", "attempt_step", "step_schedulers"]


@dataclass(frozen=True, slots=True)
class OptimizerOutcome:
    """What one optimizer did.

    Attributes
    ----------
    optimizer : str
        Its class.
    stepped : bool
        Whether it moved.
    reason : str
        Why it did not; empty if it did.
    division : str
        How unscaling and clipping reached it: ``"folded"`` into its own pass, ``"plain: ..."`` with the reason, or
        empty when nothing was left to divide.
    """

    optimizer: str
    stepped: bool
    reason: str = ""
    division: str = ""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What the last optimizer-step stage came to.

    Attributes
    ----------
    skipped : bool
        No optimizer stepped, whatever the cause.
    found_inf : bool
        Somebody who looked found gradients that are not finite, on this rank or another.
    vetoes : tuple of Veto
        Which hooks vetoed (by `state_key`), and why.
    optimizers : tuple of OptimizerOutcome
        One for each optimizer.
    window_open : bool
        More batches follow before a step is attempted.
    """

    skipped: bool
    found_inf: bool = False
    vetoes: tuple[Veto, ...] = ()
    optimizers: tuple[OptimizerOutcome, ...] = ()
    window_open: bool = False


def attempt_step(ctx: TrainContext, window: UpdateWindow) -> StepOutcome:
    """Step every optimizer that may step, then their schedulers, and end the scaler's window.

    Parameters
    ----------
    ctx : TrainContext
        Holds the schedulers.
    window : UpdateWindow
        Holds optimizers, gradients, scaler and the vetoes of all hooks.

    Returns
    -------
    StepOutcome
        What happened. With a veto nothing moved.
    """
    window.resolve()
    _agree_over_ranks(window)
    reasons = [_why_not(window, place) for place in range(len(window.optimizers))]
    for gradients, reason in zip(window.gradients, reasons, strict=True):
        if not reason:
            window.step(gradients)
    moved = [o for o, reason in zip(window.optimizers, reasons, strict=True) if not reason]
    step_schedulers(ctx.lr_schedulers, window.optimizers, moved)
    found_inf = window.decision.found_inf or any(gradients.holds_inf for gradients in window.gradients)
    window.close(True if found_inf else False if moved else None)
    return StepOutcome(
        skipped=not moved,
        found_inf=found_inf,
        vetoes=tuple(window.decision.vetoes),
        optimizers=tuple(
            OptimizerOutcome(type(g.optimizer).__name__, not reason, reason, g.division)
            for g, reason in zip(window.gradients, reasons, strict=True)
        ),
    )


def step_schedulers(
    schedulers: Sequence[Any], optimizers: Sequence[torch.optim.Optimizer], moved: Sequence[torch.optim.Optimizer]
) -> None:
    """Move each scheduler whose optimizer has stepped; one that follows a metric moves with validation instead."""
    for place, scheduler in enumerate(schedulers):
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            continue
        own = getattr(scheduler, "optimizer", optimizers[place] if len(schedulers) == len(optimizers) else None)
        if any(own is optimizer for optimizer in moved) or (own is None and moved):
            scheduler.step()


def _why_not(window: UpdateWindow, place: int) -> str:
    gradients = window.gradients[place]
    if not gradients.tensors:
        return "no gradient"
    if window.vetoed:
        return "vetoed"
    return "gradients are not finite" if gradients.holds_inf else ""


def _agree_over_ranks(window: UpdateWindow) -> None:
    """OR vetoes and found-inf over all ranks, in one collective that every rank enters once a window."""
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return
    gradients = window.gradients
    mine = [window.vetoed, window.decision.found_inf, *(bool(g.holds_inf) for g in gradients)]
    device = window.device if distributed.get_backend() == "nccl" else torch.device("cpu")
    votes = torch.tensor(mine, dtype=torch.float32, device=device)
    distributed.all_reduce(votes, op=distributed.ReduceOp.MAX)
    vetoed, found_inf, *infs = (bool(vote) for vote in votes.tolist())
    if vetoed and not window.vetoed:
        window.decision.vetoes.append(Veto("another rank", "a hook vetoed there"))
    window.decision.found_inf = found_inf
    for own, inf in zip(gradients, infs, strict=True):
        own.holds_inf = inf
