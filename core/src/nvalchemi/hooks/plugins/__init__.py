"""Discovery: which hooks are installed, from whom, and how a configuration turns their names into hooks.

Listing (`list_hooks`) reads metadata alone. A plugin's code is imported when `activate_hooks` is asked for its hook.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvalchemi._lazy import door

if TYPE_CHECKING:
    from nvalchemi.hooks.plugins.activation import ActivatedHook as ActivatedHook
    from nvalchemi.hooks.plugins.activation import activate_hooks as activate_hooks
    from nvalchemi.hooks.plugins.catalog import HookListing as HookListing
    from nvalchemi.hooks.plugins.catalog import HookState as HookState
    from nvalchemi.hooks.plugins.catalog import list_hooks as list_hooks
    from nvalchemi.hooks.plugins.loader import refresh_hooks as refresh_hooks
    from nvalchemi.hooks.plugins.markers import hookimpl as hookimpl
    from nvalchemi.hooks.plugins.specs import HookOffer as HookOffer
    from nvalchemi.hooks.plugins.static import register_plugin as register_plugin

__getattr__, __dir__ = door(
    __name__,
    {
        "ActivatedHook": "nvalchemi.hooks.plugins.activation",
        "HookListing": "nvalchemi.hooks.plugins.catalog",
        "HookOffer": "nvalchemi.hooks.plugins.specs",
        "HookState": "nvalchemi.hooks.plugins.catalog",
        "activate_hooks": "nvalchemi.hooks.plugins.activation",
        "hookimpl": "nvalchemi.hooks.plugins.markers",
        "list_hooks": "nvalchemi.hooks.plugins.catalog",
        "refresh_hooks": "nvalchemi.hooks.plugins.loader",
        "register_plugin": "nvalchemi.hooks.plugins.static",
    },
)
