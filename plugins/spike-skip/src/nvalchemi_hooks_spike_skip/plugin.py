"""What this distribution offers to discovery; torch is imported when a hook is made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nvalchemi.hooks import HookOffer, hookimpl

if TYPE_CHECKING:
    from nvalchemi_hooks_spike_skip import SpikeSkipHook


def _spike_skip(**settings: Any) -> SpikeSkipHook:
    from nvalchemi_hooks_spike_skip import SpikeSkipHook

    return SpikeSkipHook(**settings)


@hookimpl
def nvalchemi_hooks() -> Iterable[HookOffer]:
    """Offer the hook by name alone: no data is left out of a run without a word of its user."""
    return [HookOffer("spike_skip", _spike_skip, summary="skips steps whose loss or gradient norm stands out")]
