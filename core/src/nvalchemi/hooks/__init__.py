"""What any engine needs of hooks: protocols, contexts, the registry, and the discovery of installed hooks.

Importing this module imports nothing else; each name is imported when it is first used.

>>> from nvalchemi.hooks import HookOffer
>>> HookOffer("noop", factory=dict).name
'noop'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvalchemi._lazy import door

if TYPE_CHECKING:
    from nvalchemi.hooks.context import HookContext as HookContext
    from nvalchemi.hooks.context import TrainContext as TrainContext
    from nvalchemi.hooks.plugins.activation import ActivatedHook as ActivatedHook
    from nvalchemi.hooks.plugins.activation import activate_hooks as activate_hooks
    from nvalchemi.hooks.plugins.catalog import HookListing as HookListing
    from nvalchemi.hooks.plugins.catalog import HookState as HookState
    from nvalchemi.hooks.plugins.catalog import list_hooks as list_hooks
    from nvalchemi.hooks.plugins.loader import refresh_hooks as refresh_hooks
    from nvalchemi.hooks.plugins.markers import hookimpl as hookimpl
    from nvalchemi.hooks.plugins.specs import HookOffer as HookOffer
    from nvalchemi.hooks.plugins.static import register_plugin as register_plugin
    from nvalchemi.hooks.protocols import CapturableHook as CapturableHook
    from nvalchemi.hooks.protocols import CheckpointableHook as CheckpointableHook
    from nvalchemi.hooks.protocols import Closable as Closable
    from nvalchemi.hooks.protocols import Enterable as Enterable
    from nvalchemi.hooks.protocols import GradientScaler as GradientScaler
    from nvalchemi.hooks.protocols import Hook as Hook
    from nvalchemi.hooks.protocols import LooksAhead as LooksAhead
    from nvalchemi.hooks.protocols import PreparesLoader as PreparesLoader
    from nvalchemi.hooks.protocols import ProvidesAveragedModel as ProvidesAveragedModel
    from nvalchemi.hooks.protocols import ProvidesExecutor as ProvidesExecutor
    from nvalchemi.hooks.protocols import ProvidesInferenceContext as ProvidesInferenceContext
    from nvalchemi.hooks.protocols import RunsOnStage as RunsOnStage
    from nvalchemi.hooks.protocols import UpdateExecutor as UpdateExecutor
    from nvalchemi.hooks.registry import HookRegistry as HookRegistry
    from nvalchemi.metadata import Provenance as Provenance
    from nvalchemi.metadata import provenance_of as provenance_of

__getattr__, __dir__ = door(
    __name__,
    {
        "ActivatedHook": "nvalchemi.hooks.plugins.activation",
        "CapturableHook": "nvalchemi.hooks.protocols",
        "CheckpointableHook": "nvalchemi.hooks.protocols",
        "Closable": "nvalchemi.hooks.protocols",
        "Enterable": "nvalchemi.hooks.protocols",
        "GradientScaler": "nvalchemi.hooks.protocols",
        "Hook": "nvalchemi.hooks.protocols",
        "HookContext": "nvalchemi.hooks.context",
        "HookListing": "nvalchemi.hooks.plugins.catalog",
        "HookOffer": "nvalchemi.hooks.plugins.specs",
        "HookRegistry": "nvalchemi.hooks.registry",
        "HookState": "nvalchemi.hooks.plugins.catalog",
        "LooksAhead": "nvalchemi.hooks.protocols",
        "PreparesLoader": "nvalchemi.hooks.protocols",
        "Provenance": "nvalchemi.metadata",
        "ProvidesAveragedModel": "nvalchemi.hooks.protocols",
        "ProvidesExecutor": "nvalchemi.hooks.protocols",
        "ProvidesInferenceContext": "nvalchemi.hooks.protocols",
        "RunsOnStage": "nvalchemi.hooks.protocols",
        "TrainContext": "nvalchemi.hooks.context",
        "UpdateExecutor": "nvalchemi.hooks.protocols",
        "activate_hooks": "nvalchemi.hooks.plugins.activation",
        "hookimpl": "nvalchemi.hooks.plugins.markers",
        "list_hooks": "nvalchemi.hooks.plugins.catalog",
        "provenance_of": "nvalchemi.metadata",
        "refresh_hooks": "nvalchemi.hooks.plugins.loader",
        "register_plugin": "nvalchemi.hooks.plugins.static",
    },
)
