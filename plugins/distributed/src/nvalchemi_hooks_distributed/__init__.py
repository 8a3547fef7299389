"""One model on many processes, on ``torch.distributed``: replicated (DDP) or sharded (FSDP2), started by ``torchrun``.

Importing this module imports nothing else; the hooks are imported when they are first used.

>>> import nvalchemi_hooks_distributed
>>> dir(nvalchemi_hooks_distributed)
['DDPHook', 'FSDPHook']
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvalchemi_hooks_distributed.ddp import DDPHook as DDPHook
    from nvalchemi_hooks_distributed.fsdp import FSDPHook as FSDPHook

__all__ = ["DDPHook", "FSDPHook"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "ddp" if name == "DDPHook" else "fsdp"
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
