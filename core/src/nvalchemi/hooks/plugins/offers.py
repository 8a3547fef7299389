"""What a plugin offers, once pluggy and we have checked it.

Each plugin has a plugin manager of its own: pluggy's own loader of entry points stops at the first plugin that fails,
and in a shared manager a registration that failed half-way would stay behind.
"""

from __future__ import annotations

from collections.abc import Iterable

from pluggy import PluginManager

from nvalchemi import metadata
from nvalchemi.hooks.plugins import specs
from nvalchemi.hooks.plugins.markers import PROJECT
from nvalchemi.hooks.plugins.specs import HookOffer
from nvalchemi.hooks.plugins.suggest import did_you_mean

__all__ = ["compare_names", "offers_of"]

_SPEC_NAME = specs.nvalchemi_hooks.__name__


def offers_of(plugin: object, name: str) -> dict[str, HookOffer]:
    """Register a plugin, a module or an object, with pluggy, and return what it offers by name.

    Raises
    ------
    AttributeError, TypeError, ValueError
        It has no implementation, or what this returns is wrong; anything else is the plugin's own error.
    """
    offers: dict[str, HookOffer] = {}
    for position, offer in enumerate(_collect(plugin, name)):
        if not isinstance(offer, HookOffer):
            raise TypeError(
                f"{_SPEC_NAME}() gave a {type(offer).__name__} at position {position}; give HookOffer objects"
            )
        if offer.name in offers:
            raise ValueError(f"{_SPEC_NAME}() offers {offer.name!r} twice; give each hook a name of its own")
        offers[offer.name] = offer
    return offers


def compare_names(offers: Iterable[str], declared: Iterable[str]) -> None:
    """Refuse a plugin whose offers and entry points differ: what is listed must be what is there."""
    missing, extra = sorted(set(declared) - set(offers)), sorted(set(offers) - set(declared))
    if missing:
        hint = f"it offers {', '.join(map(repr, extra))}" if extra else "it offers nothing under that name"
        raise ValueError(f"no offer is called {', '.join(map(repr, missing))} as the entry point is; {hint}")
    if extra:
        raise ValueError(
            f"no entry point is called {', '.join(map(repr, extra))} as the offer is; "
            f'add it to [project.entry-points."{metadata.ENTRY_POINT_GROUP}"]'
        )


def _collect(plugin: object, name: str) -> Iterable[object]:
    manager = PluginManager(PROJECT)
    manager.add_hookspecs(specs)
    manager.register(plugin, name=name)
    callers = manager.get_hookcallers(plugin) or []
    for caller in callers:
        if not caller.has_spec():
            hint = did_you_mean(caller.name, [_SPEC_NAME]) or f"; the only one is {_SPEC_NAME!r}"
            raise AttributeError(f"its @hookimpl {caller.name!r} implements no hook of nvalchemi{hint}")
    if not callers:
        mark = "mark it with @hookimpl" if hasattr(plugin, _SPEC_NAME) else "write one"
        raise AttributeError(f"it has no `@hookimpl def {_SPEC_NAME}()`; {mark} (from nvalchemi.hooks import hookimpl)")
    results = manager.hook.nvalchemi_hooks()
    if not results or not isinstance(results[0], Iterable):
        got = type(results[0]).__name__ if results else "None"
        raise TypeError(f"{_SPEC_NAME}() returned {got}; return a list of HookOffer")
    return results[0]
