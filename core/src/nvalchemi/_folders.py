"""One metadata folder of an installed distribution, of which only what is asked for is read.

Nothing here raises because of what somebody else installed: what cannot be read is empty.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

__all__ = ["UNKNOWN_NAME", "UNKNOWN_VERSION", "Distribution", "Headers", "headers_of", "lines_of_group", "read", "root"]

UNKNOWN_NAME = "unknown"
UNKNOWN_VERSION = "0+unknown"
_HEADER = re.compile(r"^(name|version|requires-dist):(.*)$", re.IGNORECASE | re.MULTILINE)


class Distribution(Protocol):
    """What is asked of a metadata folder; other finders than Python's own have their own classes for it."""

    @property
    def requires(self) -> list[str] | None: ...

    def read_text(self, filename: str) -> str | None: ...

    def locate_file(self, path: str) -> object: ...


@dataclass(frozen=True, slots=True)
class Headers:
    """The lines of the metadata that discovery needs."""

    name: str
    version: str
    requires: tuple[str, ...]


def headers_of(dist: Distribution) -> Headers:
    """Read name, version and requirements; ``dist.metadata`` parses the description too, in ten times as long."""
    modern = read(dist, "METADATA")
    text = modern or read(dist, "PKG-INFO") or read(dist, "")
    end = text.find("\n\n")
    found: dict[str, list[str]] = {"name": [], "version": [], "requires-dist": []}
    for key, value in _HEADER.findall(text, 0, len(text) if end < 0 else end):
        found[key.lower()].append(value.strip())
    return Headers(
        name=next(iter(found["name"]), UNKNOWN_NAME),
        version=next(iter(found["version"]), UNKNOWN_VERSION),
        requires=tuple(found["requires-dist"]) or (() if modern else _legacy_requires(dist)),
    )


def lines_of_group(text: str, group: str) -> Iterator[tuple[str, str]]:
    """Yield (name, target) of a group's lines in an ``entry_points.txt``; the other groups are nothing to us."""
    inside = False
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            inside = line[1:-1].strip() == group
        elif inside and line and not line.startswith("#"):
            name, _, target = line.partition("=")
            yield name.strip(), target.strip()


def read(dist: Distribution, filename: str) -> str:
    """Return the text of a file in the folder, empty where there is none.

    A plain folder is read without the layers of pathlib, which take longer than the file does; importlib-metadata has
    no public name for it. Whatever has none, a zip file or another finder's, is asked for the text.
    """
    folder = getattr(dist, "_path", None)
    try:
        if filename and isinstance(folder, Path):
            with open(f"{folder}/{filename}", "rb", buffering=0) as file:
                return file.read().decode().replace("\r\n", "\n")
        return dist.read_text(filename) or ""
    except Exception:  # undecodable file, or a foreign finder with faults of its own: passed over, never fatal
        return ""


def root(dist: Distribution) -> str:
    """Return the place on the path that holds the folder."""
    try:
        return str(dist.locate_file(""))
    except Exception:  # foreign finders need not have places: they share one
        return ""


def _legacy_requires(dist: Distribution) -> tuple[str, ...]:
    """Read the requirements of an egg-info folder, which keeps them in a file of its own."""
    if not read(dist, "requires.txt"):
        return ()
    try:
        return tuple(dist.requires or ())
    except Exception:  # a damaged requires.txt of somebody else must not stop the listing
        return ()
