"""What this distribution offers to discovery; torch is imported when a hook is made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nvalchemi.hooks import HookOffer, hookimpl

if TYPE_CHECKING:
    from nvalchemi_hooks_distributed import DDPHook, FSDPHook

__all__ = ["nvalchemi_hooks"]


def _ddp(**settings: Any) -> DDPHook:
    from nvalchemi_hooks_distributed import DDPHook

    return DDPHook(**settings)


def _fsdp(**settings: Any) -> FSDPHook:
    from nvalchemi_hooks_distributed import FSDPHook

    return FSDPHook(**settings)


@hookimpl
def nvalchemi_hooks() -> Iterable[HookOffer]:
    """Offer the hooks, without defaults: only the user knows how a model is to be spread.

    Examples
    --------
    >>> [(offer.name, offer.default_kwargs) for offer in nvalchemi_hooks()]
    [('ddp', None), ('fsdp', None)]
    """
    return [
        HookOffer("ddp", _ddp, summary="a replica of the model on every process, gradients averaged"),
        HookOffer("fsdp", _fsdp, summary="the model sharded over the processes, gathered layer by layer"),
    ]
