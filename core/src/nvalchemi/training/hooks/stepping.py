"""Optimizers, schedulers and scaler: one attempt to step them, and one report of what happened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nvalchemi.hooks.context import TrainContext
from nvalchemi.training.hooks.decision import Veto
from nvalchemi.training.hooks.executor import why_not_folded
from nvalchemi.training.hooks.gradients import OptimizerGradients
from nvalchemi.training.hooks.pending import HostMirror
from nvalchemi.training.hooks.window import UpdateWindow

__all__ = ["OptimizerOutcome", "StepOutcome", "Waiting", "attempt_step", "attempt_without_waiting", "step_schedulers"]

_are_there, _found_inf = attrgetter("are_there"), attrgetter("found_inf")


class OptimizerOutcome(NamedTuple):
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


class StepOutcome(NamedTuple):
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
    resolution : str
        When the host knew: ``"before the step"``, ``"lazily, after the step"``, or ``"at once: ..."`` with the reason
        why a lazy update did not wait for somebody to ask.
    """

    skipped: bool
    found_inf: bool = False
    vetoes: tuple[Veto, ...] = ()
    optimizers: tuple[OptimizerOutcome, ...] = ()
    window_open: bool = False
    resolution: str = "before the step"


class Waiting(NamedTuple):
    """A step that was taken under a veto on the device.

    Attributes
    ----------
    veto_flag : torch.Tensor or None
        float32, 0-dim, exactly 1 if no optimizer stepped, else 0; None where only readings are on their way.
    finish : callable
        Waits for the host to know, moves the schedulers of a context, and returns what happened.
    again : callable
        Gives the same for the numbers as they are on the device now: the step was done once more, by a replay.
    """

    veto_flag: Tensor | None
    finish: Callable[[TrainContext], StepOutcome]
    again: Callable[[], Waiting]


def attempt_step(ctx: TrainContext, window: UpdateWindow, resolution: str = "before the step") -> StepOutcome:
    """Step every optimizer that may step, then their schedulers, and end the scaler's window.

    Parameters
    ----------
    ctx : TrainContext
        Holds the schedulers.
    window : UpdateWindow
        Holds optimizers, gradients, scaler and the vetoes of all hooks.
    resolution : str
        What the outcome says of it.

    Returns
    -------
    StepOutcome
        What happened. With a veto nothing moved.
    """
    window.resolve()
    if window.ranks is not None:
        window.ranks.agree()
    return _carry_out(ctx, window, window.gradients, [], resolution)


def attempt_without_waiting(ctx: TrainContext, window: UpdateWindow) -> StepOutcome | Waiting:
    """Do the same under a veto that stays on the device, or at once where that cannot be.

    Returns
    -------
    Waiting or StepOutcome
        A step whose outcome is still to come; or the outcome, with the reason in ``resolution``.
    """
    ranks = window.ranks
    obstacle = _why_at_once(window) or ("" if ranks is None else ranks.why_at_once())
    if obstacle:
        return attempt_step(ctx, window, f"at once: {obstacle}")
    everybody = window.gradients
    chosen = list(filter(_are_there, everybody))
    common, own = window.fold()
    if ranks is not None:
        common, own = ranks.agree_on_device(common, own)
    flag = _all_of(own)
    numbers, take = window.ask()
    mirror = HostMirror([*numbers, *(() if ranks is None else ranks.votes)])

    def know(mirror: HostMirror = mirror) -> None:
        values = mirror.read()
        take(values[: len(numbers)])
        if ranks is not None:
            ranks.take(values[len(numbers) :])
            ranks.check(together=False)

    for place, (gradients, veto_flag) in enumerate(zip(chosen, own, strict=True)):
        if veto_flag is None:
            window.step(gradients)
        elif not window.execute(gradients, veto_flag, alone=veto_flag is not flag):
            know()
            return _carry_out(ctx, window, everybody, chosen[:place], f"at once: {_why_no_veto(gradients)}")
    window.close(_any_of(own) if window.scaler is not None else None)

    def waiting_for(mirror: HostMirror) -> Waiting:
        def finish(ctx: TrainContext) -> StepOutcome:
            know(mirror)
            return _carry_out(ctx, window, everybody, chosen, "lazily, after the step")

        return Waiting(flag, finish, lambda: waiting_for(mirror.again()))

    return waiting_for(mirror)


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


def _carry_out(
    ctx: TrainContext,
    window: UpdateWindow,
    everybody: Sequence[OptimizerGradients],
    done: Sequence[OptimizerGradients],
    resolution: str,
) -> StepOutcome:
    """Step who may step, those apart who have stepped under a veto on the device, and report."""
    decision = window.decision
    reports, moved, found_inf = [], [], decision.found_inf
    vetoed = bool(decision.vetoes)
    for gradients in everybody:
        reason = _why_not(vetoed, gradients)
        if reason:
            gradients.division = ""
        else:
            moved.append(gradients.optimizer)
            if gradients in done:  # they are equal only to themselves
                window.settle_division(gradients)
            else:
                window.step(gradients)
        found_inf |= bool(gradients.holds_inf)
        reports.append(OptimizerOutcome(type(gradients.optimizer).__name__, not reason, reason, gradients.division))
    if ctx.lr_schedulers:
        step_schedulers(ctx.lr_schedulers, window.optimizers, moved)
    window.close(True if found_inf else False if moved else None)
    return StepOutcome(not moved, found_inf, tuple(decision.vetoes), tuple(reports), resolution=resolution)


def _why_not(vetoed: bool, gradients: OptimizerGradients) -> str:
    if not gradients.holds_any:
        return "no gradient"
    if vetoed:
        return "vetoed"
    return "gradients are not finite" if gradients.holds_inf else ""


def _why_at_once(window: UpdateWindow) -> str:
    """Return why the host has to know before the step, or does so anyway; empty if it has not."""
    scaler, deferred = window.scaler, window.decision.deferred
    if window.vetoed:
        return "a hook has vetoed"
    if not any(map(_are_there, window.gradients)):
        return "there is no gradient"
    if scaler is not None and not scaler.folds:
        return "the scaler unscales by itself"
    if scaler is not None and not all(map(_found_inf, deferred)):
        return "a veto on finite gradients leaves the loss scale as it is"
    if scaler is None and not window.decision.waits and (window.ranks is None or window.ranks.alike):
        return "nothing is left to decide"
    return ""


def _why_no_veto(gradients: OptimizerGradients) -> str:
    name = type(gradients.optimizer).__name__
    obstacle = why_not_folded(gradients.optimizer, gradients.tensors)
    return f"{name} takes no veto along: {obstacle or 'its state is not complete, or code is hooked to its step'}"


def _all_of(flags: Sequence[Tensor | None]) -> Tensor | None:
    """Return the flag that says that every optimizer is held back."""
    return flags[0] if _is_one(flags) else _stacked(flags).amin()


def _any_of(flags: Sequence[Tensor | None]) -> Tensor | None:
    """Return the flag that says that at least one is."""
    return flags[0] if _is_one(flags) else _stacked(flags).amax()


def _is_one(flags: Sequence[Tensor | None]) -> bool:
    """Return whether all are the same flag, or None."""
    return all(map(is_, flags, repeat(flags[0])))


def _stacked(flags: Sequence[Tensor | None]) -> Tensor:
    known = [flag for flag in flags if flag is not None]
    return torch.stack([flag.to(known[0].device) for flag in known])
