"""The weight update in one pass over memory, as a hook: AdamW, division, veto and moving average on Triton.

Importing this package imports nothing else; the class is imported when it is first used, triton when a run is set up.

>>> from nvalchemi_hooks_triton import TritonHook
>>> TritonHook().state_key
'triton'
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvalchemi_hooks_triton.hook import TritonHook as TritonHook

__all__ = ["TritonHook"]


def __getattr__(name: str) -> Any:
    if name != "TritonHook":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nvalchemi_hooks_triton.hook import TritonHook

    globals()[name] = TritonHook
    return TritonHook


def __dir__() -> list[str]:
    return __all__
