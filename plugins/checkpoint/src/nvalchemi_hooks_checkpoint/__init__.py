"""Checkpoints while a run trains: every so many steps or epochs, the last k and the best, written aside.

Importing this module imports nothing else; the hook is imported when it is first used.

>>> import nvalchemi_hooks_checkpoint
>>> dir(nvalchemi_hooks_checkpoint)
['CheckpointHook', 'best_checkpoint', 'latest_checkpoint']
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvalchemi_hooks_checkpoint.disk import best_checkpoint as best_checkpoint
    from nvalchemi_hooks_checkpoint.disk import latest_checkpoint as latest_checkpoint
    from nvalchemi_hooks_checkpoint.hook import CheckpointHook as CheckpointHook

__all__ = ["CheckpointHook", "best_checkpoint", "latest_checkpoint"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "hook" if name == "CheckpointHook" else "disk"  # looking for a checkpoint needs no torch
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
