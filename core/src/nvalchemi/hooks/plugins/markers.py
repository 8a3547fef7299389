"""The two marks that pluggy looks for: the core marks the specification, a plugin its implementation."""

from __future__ import annotations

from typing import Final

from pluggy import HookimplMarker, HookspecMarker

__all__ = ["PROJECT", "hookimpl", "hookspec"]

PROJECT: Final = "nvalchemi"

hookspec: Final = HookspecMarker(PROJECT)
hookimpl: Final = HookimplMarker(PROJECT)
