"""Gradient centralization: weight gradients with a mean of zero.

Importing this package imports nothing else; the class is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grad_centralization.hook import GradCentralizationHook as GradCentralizationHook

__all__ = ["GradCentralizationHook"]


def __getattr__(name: str) -> Any:
    if name != "GradCentralizationHook":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from grad_centralization.hook import GradCentralizationHook

    return GradCentralizationHook


def __dir__() -> list[str]:
    return __all__
