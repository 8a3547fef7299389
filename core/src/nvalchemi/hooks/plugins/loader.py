"""From an installed hook's listing to its offer: import the plugin, let pluggy validate it, check what it offers.

One plugin is loaded at a time, when one of its hooks is used, and each has a plugin manager of its own: pluggy's own
loader of entry points stops at the first plugin that fails, and in a shared manager a registration that failed half-way
would stay behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from importlib_metadata import EntryPoint
from pluggy import PluginManager

from nvalchemi import metadata
from nvalchemi.errors import HookSwitchedOffError, PluginLoadError, PluginVersionError
from nvalchemi.hooks.plugins import specs
from nvalchemi.hooks.plugins.catalog import HookListing, HookState, forget_failures, record_failure
from nvalchemi.hooks.plugins.markers import PROJECT
from nvalchemi.hooks.plugins.specs import HookOffer
from nvalchemi.hooks.plugins.suggest import did_you_mean
from nvalchemi.hooks.plugins.switches import DISABLE

__all__ = ["load_offer", "refresh_hooks"]

_SPEC_NAME = specs.nvalchemi_hooks.__name__
_loaded: dict[tuple[str, str], Mapping[str, HookOffer]] = {}


def load_offer(listing: HookListing) -> HookOffer:
    """Load the plugin behind a listing, unless it is loaded, and return what it offers under the listing's name.

    Raises
    ------
    HookSwitchedOffError
        The environment switches it off.
    PluginVersionError
        It was made for another version of the core. As above, none of its code was imported.
    PluginLoadError
        It cannot be imported, or what it offers is wrong. Not remembered: the next call tries again.
    """
    if listing.state in (HookState.DISABLED, HookState.NOT_ALLOWED):
        raise HookSwitchedOffError(f"the hook {listing} is {listing.state}: {listing.reason}")
    if listing.state is HookState.INCOMPATIBLE:
        raise PluginVersionError(
            f"the hook {listing} was left alone: {listing.reason}. Install versions that fit each other."
        )
    key = (listing.target, listing.distribution)
    if key not in _loaded:
        try:
            _loaded[key] = _load(listing)
        except (Exception, SystemExit) as error:  # a guest's import may raise anything, and even try to leave
            cause = f"{type(error).__name__}: {error}"
            record_failure(*key, cause)
            raise PluginLoadError(
                f"the hook {listing} could not be loaded: {cause}. "
                f"Mend or update {listing.distribution}; {_switch_off(listing)} goes on without it."
            ) from error
        forget_failures(*key)
    return _loaded[key][listing.name]


def refresh_hooks() -> None:
    """Scan the installed distributions again, for what was installed or mended while Python runs.

    >>> refresh_hooks()
    """
    metadata.refresh()
    _loaded.clear()
    forget_failures()


def _switch_off(listing: HookListing) -> str:
    return f"{DISABLE}={','.join(_declared_names(listing))}"


def _declared_names(listing: HookListing) -> list[str]:
    """Return the names of all entry points with the listing's target."""
    return [
        record.name
        for record in metadata.entry_points()
        if (record.target, record.distribution) == (listing.target, listing.distribution)
    ]


def _load(listing: HookListing) -> Mapping[str, HookOffer]:
    plugin = EntryPoint(listing.name, listing.target, metadata.ENTRY_POINT_GROUP).load()
    offers: dict[str, HookOffer] = {}
    for position, offer in enumerate(_collect(plugin, listing.target)):
        if not isinstance(offer, HookOffer):
            raise TypeError(
                f"{_SPEC_NAME}() gave a {type(offer).__name__} at position {position}; give HookOffer objects"
            )
        if offer.name in offers:
            raise ValueError(f"{_SPEC_NAME}() offers {offer.name!r} twice; give each hook a name of its own")
        offers[offer.name] = offer
    _compare_names(offers, _declared_names(listing))
    return offers


def _collect(plugin: object, name: str) -> Iterable[object]:
    """Register a plugin with pluggy, which checks its signature, and call it."""
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


def _compare_names(offers: Iterable[str], declared: Iterable[str]) -> None:
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
