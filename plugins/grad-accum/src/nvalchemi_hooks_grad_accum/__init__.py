"""Gradient accumulation: one optimizer step for several batches, also where they differ in size.

Importing this module imports nothing else; the hook is imported when it is first used.

>>> import nvalchemi_hooks_grad_accum
>>> dir(nvalchemi_hooks_grad_accum)
['GradientAccumulationHook']
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvalchemi_hooks_grad_accum.hook import GradientAccumulationHook as GradientAccumulationHook

__all__ = ["GradientAccumulationHook"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nvalchemi_hooks_grad_accum import hook

    value = getattr(hook, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
