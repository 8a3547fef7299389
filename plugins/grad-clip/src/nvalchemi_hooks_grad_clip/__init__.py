"""Gradient clipping: once an update, on true gradients, with a veto when they are not finite.

Importing this module imports nothing else; the hook is imported when it is first used.

>>> import nvalchemi_hooks_grad_clip
>>> dir(nvalchemi_hooks_grad_clip)
['GradientClipHook']
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvalchemi_hooks_grad_clip.hook import GradientClipHook as GradientClipHook

__all__ = ["GradientClipHook"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nvalchemi_hooks_grad_clip import hook

    value = getattr(hook, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
