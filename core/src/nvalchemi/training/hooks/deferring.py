"""Who may leave a veto on the device, when, and as what; and what gradients may be divided by."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from nvalchemi.errors import HookContractError

if TYPE_CHECKING:
    from nvalchemi.training.hooks.update import TrainingUpdateHook

__all__ = ["Turn", "checked_deferrer", "checked_divisor", "checked_scalar"]


class Turn:
    """Which hook of a composition is at work, as its windows know it: whose veto, and whose reason, it is."""

    hook: TrainingUpdateHook | None = None


def checked_deferrer(hook: TrainingUpdateHook | None, reason: str, *, voting: bool) -> TrainingUpdateHook:
    """Return the hook at work, which must be one that may defer a veto, here and now."""
    if hook is None or not hook.defers_veto:
        who = "Code outside an update hook" if hook is None else f"{type(hook).__name__}, whose defers_veto is False,"
        raise HookContractError(
            f"{who} called defer_veto(reason={reason!r}); set `defers_veto = True` on the hook, or return False."
        )
    if not hook.may_veto:
        raise HookContractError(
            f"{type(hook).__name__}, whose may_veto is False, called defer_veto(reason={reason!r}); leave may_veto "
            "out, or do not veto."
        )
    if not voting:
        raise HookContractError(
            f"{type(hook).__name__} deferred a veto where nobody acts on it: outside before_optimizer_step, or "
            "in a window that is still open (ctx.window_complete is False)."
        )
    return hook


def checked_scalar(number: object, hook: object) -> Tensor:
    """Return a number on the device, detached, or say that it is none."""
    if not isinstance(number, Tensor) or number.dim() != 0:
        got = f"a tensor of shape {tuple(number.shape)}" if isinstance(number, Tensor) else repr(number)
        raise HookContractError(
            f"{type(hook).__name__} deferred a veto on {got}; give a 0-dim tensor (non-zero or nan vetoes)."
        )
    return number.detach() if number.requires_grad else number


def checked_divisor(by: float | Tensor) -> float | Tensor:
    """Return what a window holds, or say that gradients cannot be divided by it; a tensor's value is not looked at."""
    if isinstance(by, Tensor):
        fits, got = by.dim() == 0 and not by.is_complex(), f"a {by.dtype} tensor of shape {tuple(by.shape)}"
    else:
        fits, got = isinstance(by, int | float) and 0 < by < math.inf, repr(by)
    if not fits:
        raise HookContractError(f"ctx.window.normalise got {got}; give a finite number above 0, or a 0-dim tensor.")
    return by
