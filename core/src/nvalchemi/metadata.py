"""What the installed distributions say about themselves, read without importing any of them.

One scan of the metadata folders a process, cached until :func:`refresh`. Nothing here raises because of what somebody
else installed: a damaged folder is passed over or listed with what could be read.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import importlib_metadata

from nvalchemi._folders import UNKNOWN_NAME, UNKNOWN_VERSION, Headers, headers_of, lines_of_group, read, root

__all__ = [
    "CORE_DISTRIBUTION",
    "ENTRY_POINT_GROUP",
    "UNKNOWN_VERSION",
    "EntryPointRecord",
    "Provenance",
    "add_records",
    "all_headers",
    "canonical_name",
    "core_version",
    "entry_points",
    "provenance_of",
    "refresh",
    "version_of",
]

CORE_DISTRIBUTION = "nvalchemi-hooks"
ENTRY_POINT_GROUP = "nvalchemi.hooks"
_SEPARATORS = re.compile("[-_.]+")


@dataclass(frozen=True, slots=True)
class Provenance:
    """The distribution and version that something comes from.

    >>> str(Provenance("nvalchemi-hooks-ema", "0.1.0"))
    'nvalchemi-hooks-ema 0.1.0'
    """

    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True, slots=True)
class EntryPointRecord:
    """One line of the entry-point group, with what its distribution says of itself.

    Attributes
    ----------
    name : str
        Left of the equals sign: the hook's name.
    target : str
        Right of it: ``module`` or ``module:object``.
    distribution, version : str
        Whose line it is.
    requires : tuple of str
        The ``Requires-Dist`` lines of the distribution.
    """

    name: str
    target: str
    distribution: str
    version: str
    requires: tuple[str, ...] = ()


def canonical_name(distribution: str) -> str:
    """Write a distribution's name in the one spelling that compares equal.

    >>> canonical_name("Acme_Hooks")
    'acme-hooks'
    """
    return _SEPARATORS.sub("-", distribution).lower()


_added: dict[tuple[str, str, str], EntryPointRecord] = {}


@functools.cache
def entry_points() -> tuple[EntryPointRecord, ...]:
    """Return every line of the group ``nvalchemi.hooks``, sorted by name, distribution and target.

    A distribution counts once, however many metadata folders it has: the first on the path is the one that Python would
    import, and of several in one folder the newest counts. The order of the directory never matters.
    """
    found, ranks = _folders_with_hooks()
    for _, name, _ in _added:
        found.pop(name, None)
    records = [
        record
        for name, folders in found.items()
        if not _is_shadowed(name, chosen := _choose(folders), ranks)
        for record in chosen.records
    ]
    return tuple(sorted([*_added.values(), *records], key=_key))


def add_records(records: Iterable[EntryPointRecord]) -> None:
    """Count these lines as installed, in place of what the metadata of their distributions says."""
    _added.update((_key(record), record) for record in records)
    entry_points.cache_clear()


@functools.cache
def core_version() -> str:
    """Return the version of the installed core, ``"0+unknown"`` when it runs without being installed."""
    return version_of(CORE_DISTRIBUTION)


@functools.cache
def version_of(distribution: str) -> str:
    """Return the version of an installed distribution, ``"0+unknown"`` when it is not there or does not say."""
    versions = (headers_of(dist).version for dist in importlib_metadata.distributions(name=distribution))
    return next((version for version in versions if version != UNKNOWN_VERSION), UNKNOWN_VERSION)


def all_headers(distribution: str) -> importlib_metadata.PackageMetadata | None:
    """Return everything that a distribution says of itself; None when it is not installed, or its metadata damaged."""
    try:
        return next((dist.metadata for dist in importlib_metadata.distributions(name=distribution)), None)
    except Exception:  # somebody else's metadata, or finder, can be damaged in many ways
        return None


def provenance_of(obj: object) -> Provenance | None:
    """Say which installed distribution a hook comes from, or None when no distribution owns it.

    Parameters
    ----------
    obj : object
        A hook, or its class.

    Returns
    -------
    Provenance or None
        The distribution among those with hooks whose module is nearest to that of the class; else whoever installed the
        top-level package; None for a class of the running script or of the standard library. Never raises.

    Examples
    --------
    >>> provenance_of(object()) is None
    True
    """
    module = str(getattr(obj if isinstance(obj, type) else type(obj), "__module__", ""))
    package = module.partition(".")[0]
    if not package or package == "__main__" or package in sys.stdlib_module_names:
        return None
    if package == __name__.partition(".")[0]:
        return Provenance(CORE_DISTRIBUTION, core_version())
    near = [record for record in entry_points() if re.split("[.:]", record.target.strip(), maxsplit=1)[0] == package]
    if near:
        nearest = max(near, key=lambda record: _shared_parts(record.target.partition(":")[0].strip(), module))
        return Provenance(nearest.distribution, nearest.version)
    owners = _package_owners().get(package, ())
    return Provenance(owners[0], version_of(owners[0])) if owners else None


def refresh() -> None:
    """Forget what was scanned, so that a package installed since then is seen."""
    importlib.invalidate_caches()
    for cached in (entry_points, core_version, _package_owners, version_of):
        cached.cache_clear()


@dataclass(frozen=True, slots=True)
class _Folder:
    """One metadata folder that has lines in the group; `rank` counts the places on the path that hold metadata."""

    rank: int
    headers: Headers
    lines: tuple[tuple[str, str], ...]

    @property
    def records(self) -> list[EntryPointRecord]:
        of = self.headers
        return [EntryPointRecord(name, target, of.name, of.version, of.requires) for name, target in self.lines]


def _folders_with_hooks() -> tuple[dict[str, list[_Folder]], dict[str, int]]:
    """Return the folders that have lines in the group, by distribution, and the rank of each place on the path."""
    ranks: dict[str, int] = {}
    found: dict[str, list[_Folder]] = {}
    for dist in importlib_metadata.distributions():
        rank = ranks.setdefault(root(dist), len(ranks))
        text = read(dist, "entry_points.txt")
        if ENTRY_POINT_GROUP in text:  # nothing else is read of all the others
            headers = headers_of(dist)
            # Nameless folders are not one distribution: each is listed for itself.
            name = canonical_name(headers.name) if headers.name != UNKNOWN_NAME else f"?{len(found)}"
            lines = tuple(dict.fromkeys(lines_of_group(text, ENTRY_POINT_GROUP)))
            found.setdefault(name, []).append(_Folder(rank, headers, lines))
    return found, ranks


def _key(record: EntryPointRecord) -> tuple[str, str, str]:
    """Return what a line is sorted by, and told apart from others by."""
    return record.name, canonical_name(record.distribution), record.target


def _choose(folders: list[_Folder]) -> _Folder:
    """Pick among the folders of one distribution: first on the path, then newest, then by content."""
    nearest = min(folder.rank for folder in folders)
    here = [folder for folder in folders if folder.rank == nearest]
    if len(here) == 1:
        return here[0]
    return max(here, key=lambda folder: (_comparable(folder.headers.version), folder.lines))


def _comparable(version: str) -> tuple[bool, object]:
    from packaging.version import InvalidVersion, Version

    try:
        return True, Version(version)
    except InvalidVersion:
        return False, version


def _is_shadowed(name: str, folder: _Folder, ranks: Mapping[str, int]) -> bool:
    """Whether a folder without lines in the group, of the same distribution, comes earlier on the path."""
    if folder.rank == 0:
        return False
    return any(ranks.get(root(dist), folder.rank) < folder.rank for dist in importlib_metadata.distributions(name=name))


@functools.cache
def _package_owners() -> Mapping[str, list[str]]:
    try:
        return importlib_metadata.packages_distributions()
    except Exception:  # one damaged metadata folder makes the whole survey raise; knowing the owner is a courtesy
        return {}


def _shared_parts(one: str, other: str) -> int:
    """Count the leading parts that two dotted names share."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), min(one.count("."), other.count(".")) + 1)
