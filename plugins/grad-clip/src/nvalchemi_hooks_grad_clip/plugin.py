"""What this distribution offers to discovery; torch is imported when a hook is made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nvalchemi.hooks import HookOffer, hookimpl

if TYPE_CHECKING:
    from nvalchemi_hooks_grad_clip import GradientClipHook


def _grad_clip(**settings: Any) -> GradientClipHook:
    from nvalchemi_hooks_grad_clip import GradientClipHook

    return GradientClipHook(**settings)


@hookimpl
def nvalchemi_hooks() -> Iterable[HookOffer]:
    """Offer the hook with its defaults: clipping to norm 1 serves anybody."""
    return [HookOffer("grad_clip", _grad_clip, default_kwargs={}, summary="clips the global norm of true gradients")]
