"""A veto on steps whose loss or gradient norm stands out from what is usual, by a rule that outliers cannot bend.

Importing this module imports nothing else; what it holds is imported when it is first used.

>>> import nvalchemi_hooks_spike_skip
>>> dir(nvalchemi_hooks_spike_skip)
['Skip', 'SpikeSkipHook']
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvalchemi_hooks_spike_skip.hook import SpikeSkipHook as SpikeSkipHook
    from nvalchemi_hooks_spike_skip.report import Skip as Skip

__all__ = ["Skip", "SpikeSkipHook"]

_MODULES = {"Skip": "report", "SpikeSkipHook": "hook"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
