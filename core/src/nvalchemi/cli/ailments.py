"""What can be wrong with an environment, found in metadata alone: no plugin is imported."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import importlib_metadata

from nvalchemi._folders import Headers, headers_of, root
from nvalchemi.cli.extras import extras_of_core, unknown_extras
from nvalchemi.hooks.plugins.catalog import HookState, check_switches, listings
from nvalchemi.hooks.plugins.suggest import did_you_mean
from nvalchemi.hooks.plugins.switches import Switches
from nvalchemi.metadata import CORE_DISTRIBUTION, canonical_name, entry_points

__all__ = ["Ailment", "bad_extras", "find_ailments", "missing_for_checkpoint"]

_RIVAL = "nvalchemi-toolkit"


@dataclass(frozen=True, slots=True)
class Ailment:
    """Something that is wrong.

    Attributes
    ----------
    kind : str
        ``"duplicate"``, ``"gone"``, ``"clash"``, ``"range"``, ``"extra"``, ``"toolkit"``, ``"switch"`` or
        ``"checkpoint"``.
    subject : str
        The hook or distribution.
    problem : str
        A sentence.
    remedy : str
        What to do.
    """

    kind: str
    subject: str
    problem: str
    remedy: str


def find_ailments() -> Iterator[Ailment]:
    """Look at everything that is installed."""
    installed = [(headers_of(dist), root(dist)) for dist in importlib_metadata.distributions()]
    yield from _duplicates(installed)
    yield from _gone()
    yield from _clashes_and_ranges()
    for headers, _ in installed:
        yield from bad_extras(headers.requires, f"{headers.name} {headers.version}")
    yield from _rival(headers for headers, _ in installed)
    for sentence in check_switches(Switches.from_environment()):
        yield Ailment("switch", sentence.split(" ", 1)[0], sentence, "write the name of an installed hook")


def bad_extras(requirements: Iterable[str], where: str) -> Iterator[Ailment]:
    """Find requirements that ask for an extra the core has not: an installer only warns, and leaves it out."""
    known = extras_of_core()
    for extra in unknown_extras(requirements, known) if known else ():
        problem = (
            f"{where} asks for {CORE_DISTRIBUTION}[{extra}], and there is no such extra{did_you_mean(extra, known)}"
        )
        remedy = f"write one of {', '.join(known)}, and install again; installers leave out what they do not know"
        yield Ailment("extra", extra, problem, remedy)


def missing_for_checkpoint(path: str) -> Iterator[Ailment]:
    """Find the distributions that a checkpoint's hooks come from and that are not installed.

    Raises
    ------
    CheckpointError
        There is no checkpoint, or it is damaged.
    """
    from nvalchemi.cli.checkpoint_show import describe
    from nvalchemi.training.checkpoint.manifest import read_manifest

    for hook in describe(path, read_manifest(path))["hooks"]:
        if hook["distribution"] and hook["installed"] is None:
            yield Ailment(
                "checkpoint",
                hook["distribution"],
                f"the checkpoint {path} holds the hook {hook['key']!r} of {hook['distribution']} {hook['version']}, "
                "which is not installed",
                f"pip install {hook['distribution']}=={hook['version']}; without it the hook's state is only kept",
            )


def _duplicates(installed: Iterable[tuple[Headers, str]]) -> Iterator[Ailment]:
    ours = {canonical_name(record.distribution) for record in entry_points()} | {CORE_DISTRIBUTION}
    found: dict[str, list[str]] = defaultdict(list)
    for headers, place in installed:
        if canonical_name(headers.name) in ours:
            found[canonical_name(headers.name)].append(f"{headers.version} in {place}")
    for name, places in sorted(found.items()):
        if len(places) > 1:
            yield Ailment(
                "duplicate",
                name,
                f"{name} is installed {len(places)} times: {', '.join(sorted(places))}; one of them counts",
                f"run pip uninstall {name} until it finds nothing more, delete what is left, and install it again",
            )


def _gone() -> Iterator[Ailment]:
    for record in entry_points():
        module = record.target.partition(":")[0].strip()
        if not _is_there(module):
            yield Ailment(
                "gone",
                record.name,
                f"the entry point {record.name} = {record.target} of {record.distribution} {record.version} names a "
                "module that is not there",
                f"install {record.distribution} again, or uninstall it",
            )


def _is_there(module: str) -> bool:
    """Whether a module can be found; none of the packages above it is imported for that."""
    name, *below = module.split(".")
    try:
        spec = importlib.util.find_spec(name)
        for part in below:
            if spec is None or spec.submodule_search_locations is None:
                return False
            name = f"{name}.{part}"
            spec = importlib.machinery.PathFinder.find_spec(name, spec.submodule_search_locations)
    except (ImportError, ValueError):  # an empty name, or a module without a spec
        return False
    return spec is not None


def _clashes_and_ranges() -> Iterator[Ailment]:
    told = set()
    for listing in listings(Switches.from_environment()):
        if listing.state is HookState.CLASH and listing.name not in told:
            told.add(listing.name)
            problem = f"the name {listing.name!r} is ambiguous: {listing.reason}"
            yield Ailment("clash", listing.name, problem, "choose with distribution:name, or uninstall one of them")
        elif listing.state is HookState.INCOMPATIBLE:
            yield Ailment(
                "range", listing.name, f"{listing} is {listing.reason}", "install versions that fit each other"
            )


def _rival(installed: Iterable[Headers]) -> Iterator[Ailment]:
    for headers in installed:
        if canonical_name(headers.name) == _RIVAL:
            yield Ailment(
                "toolkit",
                _RIVAL,
                f"{headers.name} {headers.version} is installed beside {CORE_DISTRIBUTION}; both bring the package "
                "`nvalchemi`, and which of its modules are whose is a matter of chance",
                f"keep them apart: pip uninstall {_RIVAL}, and install {CORE_DISTRIBUTION} again",
            )
