"""What this distribution offers to whoever looks for hooks."""

from __future__ import annotations

from collections.abc import Iterable

from nvalchemi.hooks import HookOffer, hookimpl

__all__ = ["nvalchemi_hooks"]


@hookimpl
def nvalchemi_hooks() -> Iterable[HookOffer]:
    """Offer the hook; useful as it is, it joins ``hooks="auto"`` as well."""
    from grad_centralization.hook import GradCentralizationHook  # imports torch: only where the hook is used

    yield HookOffer(
        "grad_centralization",
        GradCentralizationHook,
        default_kwargs={},
        summary="takes the mean out of weight gradients, output by output",
    )
