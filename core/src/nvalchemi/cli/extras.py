"""Requirements that ask the core for an extra it has not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from nvalchemi.cli.inputs import parsed_toml, read_text
from nvalchemi.metadata import CORE_DISTRIBUTION, all_headers, canonical_name

__all__ = ["extras_of_core", "read_requirements", "unknown_extras"]


def extras_of_core() -> list[str]:
    """Return the extras that the installed core has; none when it runs without being installed."""
    headers = all_headers(CORE_DISTRIBUTION)
    return sorted(headers.get_all("Provides-Extra") or ()) if headers else []


def unknown_extras(requirements: Iterable[str], known: Iterable[str]) -> Iterator[str]:
    """Yield the extras of the core that are asked for and not known.

    >>> list(unknown_extras(["nvalchemi-hooks[ema,grad_clip,gradclip]", "torch[x]"], ["ema", "Grad-Clip"]))
    ['gradclip']
    """
    right = set(map(canonical_name, known))
    for line in requirements:
        try:
            requirement = Requirement(line) if "[" in line else None
        except InvalidRequirement:  # an option, a path, or what an installer refuses by itself
            continue
        if requirement and canonical_name(requirement.name) == CORE_DISTRIBUTION:
            yield from sorted(extra for extra in requirement.extras if canonical_name(extra) not in right)


def read_requirements(path: Path) -> list[str]:
    """Return the requirements of a requirements file, or of a ``pyproject.toml`` with those of its extras."""
    text = read_text(path)
    if path.suffix != ".toml":
        return [line.split(" #")[0].strip() for line in text.splitlines()]
    project = parsed_toml(text, str(path)).get("project", {})
    extras = project.get("optional-dependencies", {}).values()
    return [*project.get("dependencies", []), *(line for lines in extras for line in lines)]
