"""A veto on gradients that are not finite: for all optimizers at once, on every rank, with or without a loss scaler.

Importing this module imports nothing else; the hook is imported when it is first used.

>>> import nvalchemi_hooks_scaler_veto
>>> dir(nvalchemi_hooks_scaler_veto)
['GradScalerVetoHook']
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvalchemi_hooks_scaler_veto.hook import GradScalerVetoHook as GradScalerVetoHook

__all__ = ["GradScalerVetoHook"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nvalchemi_hooks_scaler_veto import hook

    value = getattr(hook, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
