"""What this distribution offers to discovery; torch is imported when a hook is made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nvalchemi.hooks import HookOffer, hookimpl

if TYPE_CHECKING:
    from nvalchemi_hooks_scaler_veto import GradScalerVetoHook


def _scaler_veto(**settings: Any) -> GradScalerVetoHook:
    from nvalchemi_hooks_scaler_veto import GradScalerVetoHook

    return GradScalerVetoHook(**settings)


@hookimpl
def nvalchemi_hooks() -> Iterable[HookOffer]:
    """Offer the hook with its defaults: no run is better for a step on inf or nan."""
    return [
        HookOffer("scaler_veto", _scaler_veto, default_kwargs={}, summary="skips steps whose gradients are not finite")
    ]
