"""What this distribution offers to discovery; torch and triton are imported when a hook is made and set up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nvalchemi.hooks import HookOffer, hookimpl

if TYPE_CHECKING:
    from nvalchemi_hooks_triton import TritonHook


def _triton(**settings: Any) -> TritonHook:
    from nvalchemi_hooks_triton import TritonHook

    return TritonHook(**settings)


@hookimpl
def nvalchemi_hooks() -> Iterable[HookOffer]:
    """Offer the hook, but not to everybody: it needs triton, and a GPU to be of use."""
    return [HookOffer("triton", _triton, summary="steps fused AdamW, its division, veto and average in one pass")]
