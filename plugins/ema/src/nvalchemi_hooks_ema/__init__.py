"""An exponential moving average of a model's weights, as a hook.

Importing this package imports nothing else; the class is imported when it is first used.

>>> from nvalchemi_hooks_ema import EMAHook
>>> EMAHook(decay=0.99).state_key
'ema[decay=0.99]'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvalchemi_hooks_ema.hook import EMAHook as EMAHook

__all__ = ["EMAHook"]


def __getattr__(name: str) -> Any:
    if name != "EMAHook":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nvalchemi_hooks_ema.hook import EMAHook

    globals()[name] = EMAHook
    return EMAHook


def __dir__() -> list[str]:
    return __all__
