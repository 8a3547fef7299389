"""Which versions of the core a plugin was made for, decided from its metadata before any of its code is imported."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from nvalchemi.metadata import CORE_DISTRIBUTION, UNKNOWN_VERSION, canonical_name

__all__ = ["Compatibility", "compatibility"]

_REQUIREMENT = re.compile(
    r"""\s* (?P<name> [A-Za-z0-9._-]+ ) \s* (?: \[ [^]]* \] )? \s*   # nvalchemi-hooks[ema]
        (?: @ \s* \S+ | \(? (?P<range> [^;()]* ) \)? ) \s*           # @ file:///... or >=0.1,<0.2
        (?: ; (?P<marker> .* ) )? """,
    re.VERBOSE,
)


class Compatibility(NamedTuple):
    """The range of core versions that a plugin supports, and what is against this one.

    Attributes
    ----------
    api_range : str
        For example ``"<0.2,>=0.1"``; empty when the plugin declares none.
    reason : str
        Why the installed core is out of the range; empty when it is not.
    """

    api_range: str
    reason: str


@functools.lru_cache(maxsize=1024)
def compatibility(requires: tuple[str, ...], core: str) -> Compatibility:
    """Compare the requirements of a distribution with the version of the core.

    Parameters
    ----------
    requires : tuple of str
        Its ``Requires-Dist`` lines. Those for an extra, or for another platform, do not count.
    core : str
        The version of the core; an unknown one fits every range.

    Examples
    --------
    >>> compatibility(("torch>=2.8", "nvalchemi-hooks>=0.1,<0.2"), "0.3.0")
    Compatibility(api_range='<0.2,>=0.1', reason='made for nvalchemi-hooks <0.2,>=0.1, and 0.3.0 is installed')
    """
    ours = [match for line in requires if (match := _matches_core(line)) and _applies(match["marker"])]
    written = ",".join(text for match in ours if (text := (match["range"] or "").strip()))
    if not written:
        return Compatibility("", "")
    from packaging.specifiers import InvalidSpecifier, SpecifierSet  # only needed where plugins are installed

    try:
        supported = SpecifierSet(written)
    except InvalidSpecifier:
        return Compatibility(written, f"its range of {CORE_DISTRIBUTION} versions cannot be read: {written!r}")
    if core == UNKNOWN_VERSION or supported.contains(core, prereleases=True):
        return Compatibility(str(supported), "")
    return Compatibility(str(supported), f"made for {CORE_DISTRIBUTION} {supported}, and {core} is installed")


def _matches_core(line: str) -> re.Match[str] | None:
    match = _REQUIREMENT.fullmatch(line)
    return match if match and canonical_name(match["name"]) == CORE_DISTRIBUTION else None


def _applies(marker: str | None) -> bool:
    if marker is None:
        return True
    from packaging.markers import InvalidMarker, Marker, UndefinedEnvironmentName  # slow to import, and rarely needed

    try:
        return Marker(marker).evaluate({"extra": ""})
    except (InvalidMarker, UndefinedEnvironmentName):  # an unreadable condition: the requirement counts
        return True
