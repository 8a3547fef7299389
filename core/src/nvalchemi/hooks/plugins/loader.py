"""From an installed hook's listing to its offer: one plugin is loaded at a time, when one of its hooks is used."""

from __future__ import annotations

from collections.abc import Mapping

from importlib_metadata import EntryPoint

from nvalchemi import metadata
from nvalchemi.errors import HookSwitchedOffError, PluginLoadError, PluginVersionError
from nvalchemi.hooks.plugins import static
from nvalchemi.hooks.plugins.catalog import HookListing, HookState, forget_failures, record_failure
from nvalchemi.hooks.plugins.offers import compare_names, offers_of
from nvalchemi.hooks.plugins.specs import HookOffer
from nvalchemi.hooks.plugins.switches import DISABLE

__all__ = ["load_offer", "refresh_hooks"]

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
    if key in static.offers:
        return static.offers[key][listing.name]
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
    offers = offers_of(EntryPoint(listing.name, listing.target, metadata.ENTRY_POINT_GROUP).load(), listing.target)
    compare_names(offers, _declared_names(listing))
    return offers
