"""What this distribution offers to whoever looks for hooks."""

from __future__ import annotations

from collections.abc import Iterable

from nvalchemi.hooks import HookOffer, hookimpl

__all__ = ["nvalchemi_hooks"]


@hookimpl
def nvalchemi_hooks() -> Iterable[HookOffer]:
    """Offer `EMAHook`, useful as it is.

    Examples
    --------
    >>> [offer.name for offer in nvalchemi_hooks()]
    ['ema']
    """
    from nvalchemi_hooks_ema.hook import EMAHook  # imports torch and pydantic: only where the hook is used

    yield HookOffer("ema", EMAHook, default_kwargs={}, summary="exponential moving average of a model's weights")
