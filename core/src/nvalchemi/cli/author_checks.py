"""The questions that can be put to a hook without training with it, each with what must hold and what to do."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from nvalchemi.errors import HookNameClashError, PluginLoadError, UnknownHookError
from nvalchemi.hooks.plugins.catalog import HookListing, HookState, find_hook
from nvalchemi.hooks.plugins.loader import load_offer
from nvalchemi.hooks.plugins.published import import_fault, is_bounded, missing_headers
from nvalchemi.hooks.plugins.switches import Switches

if TYPE_CHECKING:
    from nvalchemi.hooks.plugins.specs import HookOffer

__all__ = ["Answer", "answers_for"]

_TABLE = 'under [project.entry-points."nvalchemi.hooks"]'


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one question.

    Attributes
    ----------
    check : str
        Its name.
    holds : bool or None
        None: it could not be asked.
    sentence : str
        What must hold.
    fault : str
        What was found instead, or why it could not be asked.
    remedy : str
        What to do about it.
    """

    check: str
    holds: bool | None
    sentence: str
    fault: str = ""
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as data."""
        return asdict(self)


def answers_for(target: str, arguments: Mapping[str, Any]) -> Iterator[Answer]:
    """Ask everything about a hook that is installed, or about a class, one answer after another.

    Parameters
    ----------
    target : str
        A hook's name, ``distribution:name``, or ``module:Class``; modules of the working directory count.
    arguments : mapping
        Keyword arguments to make it with.

    Raises
    ------
    UnknownHookError
        Neither an installed hook nor a module is called so.
    """
    try:
        listing = find_hook(target, Switches())
    except (UnknownHookError, HookNameClashError) as error:
        module, colon, name = target.partition(":")
        if isinstance(error, HookNameClashError) or not colon or "-" in module:
            raise
        return _of_class(module, name, arguments)
    return _of_listing(listing, arguments)


def _of_listing(listing: HookListing, arguments: Mapping[str, Any]) -> Iterator[Answer]:
    yield _api_range(listing)
    yield _metadata(listing)
    offer, answer = _offer(listing)
    yield answer
    yield _import(listing, offer)
    if offer is None:
        yield from _hook(None, {}, False, "")
    else:
        given = {**(offer.default_kwargs or {}), **arguments}
        told = bool(arguments) or offer.default_kwargs is not None
        yield from _hook(
            offer.factory,
            given,
            told,
            "make it accept the default_kwargs of its offer (and --arguments), or offer None",
        )


def _of_class(module: str, name: str, arguments: Mapping[str, Any]) -> Iterator[Answer]:
    sentence = "The class can be imported, and is a class."
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a console script does not have it
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # an author's module may raise anything; that is what is asked
        found = None
        fault, remedy = f"{type(error).__name__}: {error}", "mend the module, or give another module:Class"
    else:
        fault = "" if isinstance(found, type) else f"{module}:{name} is {found!r}"
        remedy = "give module:Class"
    yield Answer("class", not fault, sentence, fault, remedy if fault else "")
    yield from _hook(None if fault else found, arguments, bool(arguments), "give other --arguments")


def _api_range(listing: HookListing) -> Answer:
    sentence = "The distribution asks for a range of nvalchemi-hooks that has both ends, and this one is in it."
    fault = "" if is_bounded(listing.api_range) else f"it asks for {listing.api_range or 'any version'}"
    if listing.state is HookState.INCOMPATIBLE:
        fault = listing.reason
    return Answer("range", not fault, sentence, fault, 'write dependencies = ["nvalchemi-hooks>=0.1,<0.2"]')


def _metadata(listing: HookListing) -> Answer:
    sentence = "The metadata has a summary, a licence, the supported Python, and a description to read."
    missing = missing_headers(listing.distribution)
    fault = f"it says nothing of {', '.join(missing)}" if missing else ""
    remedy = "fill in description, readme, license and requires-python under [project]"
    return Answer("metadata", not missing, sentence, fault, remedy)


def _offer(listing: HookListing) -> tuple[HookOffer | None, Answer]:
    sentence = "The entry point leads to a module or object whose @hookimpl offers exactly the declared names."
    remedy = f'write {listing.name} = "package.plugin" {_TABLE}, and a @hookimpl def nvalchemi_hooks() there'
    try:
        offer = load_offer(listing)
    except PluginLoadError as error:
        cause = error.__cause__
        fault = f"{type(cause).__name__}: {cause}" if cause else str(error)
        return None, Answer("offer", False, sentence, fault, remedy)
    if not offer.summary:
        return offer, Answer("offer", False, sentence, "the offer has no summary", "write HookOffer(..., summary=...)")
    return offer, Answer("offer", True, sentence)


def _import(listing: HookListing, offer: HookOffer | None) -> Answer:
    sentence = "Neither listing it nor importing its plugin module imports torch."
    if offer is None:
        return Answer("light", None, sentence, "the plugin could not be loaded")
    fault = import_fault(listing.target)
    remedy = "import torch, and the hook, inside nvalchemi_hooks() or the factory"
    return Answer("light", not fault, sentence, fault, remedy)


def _hook(
    make: Callable[..., object] | None, arguments: Mapping[str, Any], told: bool, remedy: str
) -> Iterator[Answer]:
    """Ask whether a hook can be made, and whether what is made is one; where nobody was told how, that is no fault."""
    from nvalchemi.cli.specimen import examine

    made, valid = "It can be made.", "It is an update hook or a plain hook, and a strategy takes it."
    if make is None:
        yield Answer("made", None, made, "there is nothing to make it with")
        yield Answer("hook", None, valid, "there is no hook")
        return
    try:
        hook = make(**arguments)
    except Exception as error:  # an author's constructor may raise anything
        fault = f"{type(error).__name__}: {error}"
        yield Answer("made", False if told else None, made, fault, remedy if told else "give --arguments")
        yield Answer("hook", None, valid, "there is no hook")
        return
    yield Answer("made", True, made)
    try:
        examine(hook)
    except (TypeError, ValueError) as error:
        yield Answer("hook", False, valid, str(error), "see help(nvalchemi.hooks.Hook) and help(TrainingUpdateHook)")
    else:
        yield Answer("hook", True, valid)
