"""Loss scaling and mixed precision: train in fp16 or bf16 without lost gradients.

Importing this module imports nothing else; each name is imported when it is first used.

>>> import nvalchemi_hooks_loss_scaling
>>> dir(nvalchemi_hooks_loss_scaling)
['LossScaler', 'LossScalingHook', 'MixedPrecisionHook', 'ScalingOptions']
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvalchemi_hooks_loss_scaling.mixed_precision import MixedPrecisionHook as MixedPrecisionHook
    from nvalchemi_hooks_loss_scaling.scaler import LossScaler as LossScaler
    from nvalchemi_hooks_loss_scaling.scaling_hook import LossScalingHook as LossScalingHook
    from nvalchemi_hooks_loss_scaling.settings import ScalingOptions as ScalingOptions

_HOMES = {
    "LossScaler": "scaler",
    "LossScalingHook": "scaling_hook",
    "MixedPrecisionHook": "mixed_precision",
    "ScalingOptions": "settings",
}

__all__ = ["LossScaler", "LossScalingHook", "MixedPrecisionHook", "ScalingOptions"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
