"""The list of installed hooks, made from metadata alone: nothing here imports a plugin."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from nvalchemi.errors import HookNameClashError, PluginWarning, UnknownHookError
from nvalchemi.hooks.plugins.compatibility import compatibility
from nvalchemi.hooks.plugins.suggest import did_you_mean
from nvalchemi.hooks.plugins.switches import ALLOW, DISABLE, Switches, qualified
from nvalchemi.metadata import EntryPointRecord, Provenance, core_version, entry_points
from nvalchemi.official import OFFICIAL_HOOKS, by_entry_point

__all__ = [
    "HookListing",
    "HookState",
    "check_switches",
    "find_hook",
    "forget_failures",
    "list_hooks",
    "listings",
    "record_failure",
]


class HookState(StrEnum):
    """What can be said of an installed hook without importing it."""

    AVAILABLE = "available"
    """A configuration can name it."""
    DISABLED = "disabled"
    """``NVALCHEMI_HOOKS_DISABLE`` names it."""
    NOT_ALLOWED = "not allowed"
    """``NVALCHEMI_HOOKS_ALLOW`` is set and does not name it."""
    INCOMPATIBLE = "incompatible"
    """It was made for another version of the core."""
    CLASH = "clash"
    """Several distributions offer the name; ``distribution:name`` chooses."""
    BROKEN = "broken"
    """It failed when it was last loaded in this process; it is tried again when it is next named."""


@dataclass(frozen=True, slots=True)
class HookListing:
    """One installed hook, as its distribution's metadata describes it.

    Attributes
    ----------
    name : str
        What a configuration writes.
    target : str
        The entry point's target, ``module`` or ``module:object``.
    distribution, version : str
        Who offers it.
    api_range : str
        The versions of the core that it supports; empty when it declares none.
    state : HookState
        Whether it can be used.
    reason : str
        Why not; empty when it can.
    """

    name: str
    target: str
    distribution: str
    version: str
    api_range: str = ""
    state: HookState = HookState.AVAILABLE
    reason: str = ""

    @property
    def qualified_name(self) -> str:
        """``distribution:name``, which is unambiguous."""
        return qualified(self.distribution, self.name)

    @property
    def provenance(self) -> Provenance:
        """Distribution and version."""
        return Provenance(self.distribution, self.version)

    def __str__(self) -> str:
        return f"{self.name!r} of {self.provenance} (entry point {self.name} = {self.target})"


def list_hooks() -> list[HookListing]:
    """List every installed hook, without importing any.

    Returns
    -------
    list of HookListing
        Sorted by name, then distribution. The metadata is scanned once a process; `refresh_hooks` scans again.

    Warns
    -----
    PluginWarning
        ``NVALCHEMI_HOOKS_DISABLE`` or ``NVALCHEMI_HOOKS_ALLOW`` names a hook that is not there.

    Examples
    --------
    >>> usable = [hook.name for hook in list_hooks() if hook.state is HookState.AVAILABLE]
    >>> usable == sorted(usable)
    True
    """
    switches = Switches.from_environment()
    for sentence in check_switches(switches):
        warnings.warn(sentence, PluginWarning, stacklevel=2)
    return list(listings(switches))


_failures: dict[tuple[str, str], str] = {}


@functools.lru_cache(maxsize=8)
def listings(switches: Switches) -> tuple[HookListing, ...]:
    """Return what `list_hooks` lists, under the given switches and without a warning about them."""
    core = core_version()
    every = [_listing(record, switches, core) for record in entry_points()]
    owners = Counter(listing.name for listing in every if _takes_part(listing))
    return tuple(
        _clashing(listing, every) if owners[listing.name] > 1 and _takes_part(listing) else listing for listing in every
    )


def check_switches(switches: Switches) -> list[str]:
    """Return one sentence for each name in the switches that is neither installed nor official."""
    if not switches.disabled and not switches.allowed:
        return []
    installed = entry_points()
    official = ((hook.entry_point, qualified(hook.distribution, hook.entry_point)) for hook in OFFICIAL_HOOKS)
    names = ((record.name, qualified(record.distribution, record.name)) for record in installed)
    return switches.unknown_names(name for pair in (*names, *official) for name in pair)


def find_hook(name: str, switches: Switches) -> HookListing:
    """Return the one installed hook that a configuration means by `name`, or by ``distribution:name``.

    A hook that is switched off or incompatible never stands in the way of another one with the same name.

    Raises
    ------
    UnknownHookError
        None is called so; the message has the closest match, or how to install it.
    HookNameClashError
        Several are, and none was chosen.
    """
    installed = listings(switches)
    distribution, _, bare = name.rpartition(":")
    wanted = qualified(distribution, bare) if distribution else name
    found = [listing for listing in installed if wanted == (listing.qualified_name if distribution else listing.name)]
    if not found:
        raise UnknownHookError(_unknown(name, installed))
    usable = [listing for listing in found if _takes_part(listing)]
    if len(usable) > 1:
        raise HookNameClashError(f"the hook name {name!r} is ambiguous: {_clash(usable)}")
    return (usable or found)[0]


def record_failure(target: str, distribution: str, reason: str) -> None:
    """Remember for the listing that a plugin could not be loaded; loading is tried again all the same."""
    _failures[target, distribution] = reason
    listings.cache_clear()


def forget_failures(target: str | None = None, distribution: str | None = None) -> None:
    """Forget the failure of one plugin, or all of them; the listing is made anew."""
    if target is None or distribution is None:
        _failures.clear()
        listings.cache_clear()
    elif _failures.pop((target, distribution), None) is not None:
        listings.cache_clear()


def _listing(record: EntryPointRecord, switches: Switches, core: str) -> HookListing:
    supported = compatibility(record.requires, core)
    state, reason = HookState.AVAILABLE, ""
    if switches.is_disabled(record.name, record.distribution):
        state, reason = HookState.DISABLED, f"switched off by {DISABLE}"
    elif not switches.is_allowed(record.name, record.distribution):
        state, reason = HookState.NOT_ALLOWED, f"not named in {ALLOW}"
    elif supported.reason:
        state, reason = HookState.INCOMPATIBLE, supported.reason
    elif failure := _failures.get((record.target, record.distribution)):
        state, reason = HookState.BROKEN, failure
    return HookListing(
        record.name, record.target, record.distribution, record.version, supported.api_range, state, reason
    )


def _takes_part(listing: HookListing) -> bool:
    """Whether a listing is a candidate for its name: neither switched off nor made for another core."""
    return listing.state in (HookState.AVAILABLE, HookState.CLASH, HookState.BROKEN)


def _clashing(listing: HookListing, every: Iterable[HookListing]) -> HookListing:
    rivals = [other for other in every if other.name == listing.name and _takes_part(other)]
    return replace(listing, state=HookState.CLASH, reason=_clash(rivals))


def _clash(rivals: list[HookListing]) -> str:
    if len({rival.qualified_name for rival in rivals}) == 1:
        targets = " and ".join(rival.target for rival in rivals)
        return f"{rivals[0].provenance} declares it twice, for {targets}; only its author can mend that"
    owners = " and ".join(str(rival.provenance) for rival in rivals)
    choices = " or ".join(repr(rival.qualified_name) for rival in rivals)
    return f"{owners} offer it; write {choices}"


def _unknown(name: str, installed: Iterable[HookListing]) -> str:
    distribution, _, bare = name.rpartition(":")
    official = by_entry_point(bare)
    if official and distribution in ("", official.distribution):
        return (
            f"the hook {name!r} is in the distribution {official.distribution}, which is not installed: "
            f"{official.install_command}"
        )
    known = sorted({listing.qualified_name if distribution else listing.name for listing in installed})
    hint = did_you_mean(name, known)
    there = f"installed are {', '.join(known)}" if known else "no hooks are installed"
    if not hint and (close := did_you_mean(bare, (hook.entry_point for hook in OFFICIAL_HOOKS))):
        hint = f"{close} It is official: pip install 'nvalchemi-hooks[all]'"
    return f"no installed hook is called {name!r}{hint} ({there})"
