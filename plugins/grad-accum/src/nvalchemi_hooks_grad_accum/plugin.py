"""What this distribution offers to discovery; torch is imported when a hook is made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nvalchemi.hooks import HookOffer, hookimpl

if TYPE_CHECKING:
    from nvalchemi_hooks_grad_accum import GradientAccumulationHook


def _grad_accum(**settings: Any) -> GradientAccumulationHook:
    from nvalchemi_hooks_grad_accum import GradientAccumulationHook

    return GradientAccumulationHook(**settings)


@hookimpl
def nvalchemi_hooks() -> Iterable[HookOffer]:
    """Offer the hook; how many batches make a step is for a run to say."""
    return [HookOffer("grad_accum", _grad_accum, summary="takes one optimizer step for several batches")]
