"""What this distribution offers to discovery; torch is imported when a hook is made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nvalchemi.hooks import HookOffer, hookimpl

if TYPE_CHECKING:
    from nvalchemi_hooks_checkpoint import CheckpointHook

__all__ = ["nvalchemi_hooks"]


def _checkpoint(**settings: Any) -> CheckpointHook:
    from nvalchemi_hooks_checkpoint import CheckpointHook

    return CheckpointHook(**settings)


@hookimpl
def nvalchemi_hooks() -> Iterable[HookOffer]:
    """Offer the hook, without defaults: only the user knows where checkpoints belong.

    Examples
    --------
    >>> [offer.default_kwargs for offer in nvalchemi_hooks()]
    [None]
    """
    return [HookOffer("checkpoint", _checkpoint, summary="saves the run while it trains: the last k and the best")]
