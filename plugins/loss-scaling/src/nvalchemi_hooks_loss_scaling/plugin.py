"""What this distribution offers to discovery; torch is imported when a hook is made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nvalchemi.hooks import HookOffer, hookimpl

if TYPE_CHECKING:
    from nvalchemi_hooks_loss_scaling import LossScalingHook, MixedPrecisionHook


def _loss_scaling(**settings: Any) -> LossScalingHook:
    from nvalchemi_hooks_loss_scaling import LossScalingHook

    return LossScalingHook(**settings)


def _mixed_precision(**settings: Any) -> MixedPrecisionHook:
    from nvalchemi_hooks_loss_scaling import MixedPrecisionHook

    return MixedPrecisionHook(**settings)


@hookimpl
def nvalchemi_hooks() -> Iterable[HookOffer]:
    """Offer both hooks by name alone: the precision of a run is never chosen without a word of its user."""
    return [
        HookOffer("loss_scaling", _loss_scaling, summary="scales the loss so that small fp16 gradients survive"),
        HookOffer(
            "mixed_precision", _mixed_precision, summary="trains in fp32, bf16 or fp16; scales the loss for fp16"
        ),
    ]
