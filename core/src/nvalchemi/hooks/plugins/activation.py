"""From a configuration to hooks: names are looked up, loaded and built; hooks that are built already pass through."""

from __future__ import annotations

import logging
import reprlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nvalchemi.errors import HookNameClashError, PluginLoadError, PluginWarning, UnknownHookError
from nvalchemi.hooks.plugins.catalog import HookListing, HookState, check_switches, find_hook, listings
from nvalchemi.hooks.plugins.loader import load_offer
from nvalchemi.hooks.plugins.specs import HookOffer
from nvalchemi.hooks.plugins.switches import Switches, is_first_rank
from nvalchemi.metadata import Provenance, provenance_of

__all__ = ["AUTO", "ActivatedHook", "activate_hooks"]

AUTO = "auto"
_DEFAULT_PRIORITY = 50
_log = logging.getLogger("nvalchemi.hooks")


@dataclass(frozen=True, slots=True)
class ActivatedHook:
    """A hook that joins a run, and where it comes from.

    Attributes
    ----------
    label : str or None
        The key in a mapping of hooks.
    hook : object
        The hook itself.
    provenance : Provenance or None
        Its distribution and version; None when no distribution owns it.
    name : str or None
        The name it was activated by; None for a hook that was built by the caller.
    """

    label: str | None
    hook: object
    provenance: Provenance | None
    name: str | None = None

    def __str__(self) -> str:
        label = f"{self.label}: " if self.label else ""
        return f"{label}{self.name or type(self.hook).__name__} ({self.provenance or 'no installed distribution'})"


def activate_hooks(config: object) -> list[ActivatedHook]:
    """Turn a configuration into hooks; only the plugins that it names are imported.

    Parameters
    ----------
    config : None, iterable, mapping or str
        An iterable of items, one item, or a mapping from a label to an item. An item is the name of an installed hook,
        a mapping of one name to its keyword arguments, or a hook. ``distribution:name`` chooses where two distributions
        offer a name. ``"auto"`` stands for every installed hook whose offer has default arguments, sorted by priority
        and then name.

    Returns
    -------
    list of ActivatedHook
        In the order of the configuration. Each is logged at level INFO by ``nvalchemi.hooks``.

    Raises
    ------
    UnknownHookError, HookNameClashError, HookSwitchedOffError, PluginLoadError
        A hook that was named cannot be had. With ``"auto"`` such a hook is left out with a `PluginWarning`, unless
        ``NVALCHEMI_HOOKS_STRICT`` is set.
    TypeError, ValueError
        The configuration is none of the above, or the hook refused its arguments: then the error is the hook's own,
        with a note that names its distribution and version.

    Examples
    --------
    >>> from nvalchemi.training.hooks import PassThrough
    >>> [activated] = activate_hooks({"nothing": PassThrough()})
    >>> activated.label, type(activated.hook).__name__
    ('nothing', 'PassThrough')
    """
    switches = Switches.from_environment()
    for sentence in check_switches(switches):
        _complain(UnknownHookError(sentence), switches)
    if isinstance(config, str) and config == AUTO:
        activated = _activate_all(switches)
    else:
        activated = [_activate(item, label, where, switches) for label, where, item in _items(config)]
    for hook in activated if is_first_rank() else ():
        _log.info("activated %s", hook)
    return activated


def _items(config: object) -> Iterator[tuple[str | None, str, object]]:
    """Yield (label, place, item) of a configuration; the place is for messages."""
    if config is None:
        return
    if isinstance(config, Mapping):
        for label, item in config.items():
            if not isinstance(label, str) or not label:
                raise TypeError(f"hooks[{label!r}]: a label is a non-empty string, not {label!r}")
            yield label, f"hooks[{label!r}]", item
    elif isinstance(config, str) or callable(config):  # one hook alone; it may be iterable, as pydantic models are
        yield None, "hooks", config
    elif isinstance(config, Iterable):
        yield from ((None, f"hooks[{position}]", item) for position, item in enumerate(config))
    else:
        raise TypeError(
            f'hooks is a {type(config).__name__}; give "auto", a list of hooks, or a mapping from labels to hooks'
        )


def _activate(item: object, label: str | None, where: str, switches: Switches) -> ActivatedHook:
    if isinstance(item, str):
        return _activate_named(item, {}, label, where, switches)
    if isinstance(item, Mapping):
        name, kwargs = _name_and_kwargs(item, label, where)
        return _activate_named(name, kwargs, label, where, switches)
    if isinstance(item, type):
        raise TypeError(f"{where} is the class {item.__name__}; give an instance: {item.__name__}()")
    if not callable(item):
        raise TypeError(
            f"{where} is {reprlib.repr(item)}, a {type(item).__name__}; "
            'give the name of an installed hook, {"name": {"argument": value}}, or a hook'
        )
    return ActivatedHook(label, item, provenance_of(item))


def _name_and_kwargs(item: Mapping[Any, Any], label: str | None, where: str) -> tuple[str, Mapping[str, Any]]:
    name, kwargs = next(iter(item.items())) if len(item) == 1 else (None, None)
    kwargs = {} if kwargs is None else kwargs
    if isinstance(name, str) and isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs):
        return name, kwargs
    hint = ""
    if label is not None:
        hint = f"; in a mapping the key is a label, so write {{{label!r}: {{name: arguments}}}}, or a list"
    raise ValueError(
        f"{where} is {reprlib.repr(dict(item))}; a mapping has one name with its keyword arguments, "
        f'as {{"grad_clip": {{"max_norm": 1.0}}}}{hint}'
    )


def _activate_named(
    name: str, kwargs: Mapping[str, Any], label: str | None, where: str, switches: Switches
) -> ActivatedHook:
    if name == AUTO:
        raise ValueError(f'{where} is "auto", which stands alone: hooks="auto"')
    listing = find_hook(name, switches)
    offer = load_offer(listing)
    return _build(listing, offer, {**(offer.default_kwargs or {}), **kwargs}, label)


def _build(
    listing: HookListing, offer: HookOffer, kwargs: Mapping[str, Any], label: str | None = None
) -> ActivatedHook:
    try:
        hook = offer.factory(**kwargs)
        if not callable(hook):
            raise TypeError(f"the factory returned a {type(hook).__name__}, which is no hook: it cannot be called")
    except Exception as error:  # the hook's own error, noted and raised again
        error.add_note(f"While building the hook {listing} with the arguments {reprlib.repr(dict(kwargs))}.")
        raise
    return ActivatedHook(label, hook, listing.provenance, listing.name)


def _activate_all(switches: Switches) -> list[ActivatedHook]:
    """Activate every usable hook whose offer has default arguments; leave out what fails, one warning each."""
    activated: list[ActivatedHook] = []
    for listing, offer in _load_all(switches):
        if offer.default_kwargs is not None:
            try:
                activated.append(_build(listing, offer, offer.default_kwargs))
            except Exception as error:  # whatever a guest raises, the others join
                _complain(error, switches)
    return sorted(activated, key=lambda one: (_priority(one.hook), one.name or ""))


def _load_all(switches: Switches) -> Iterator[tuple[HookListing, HookOffer]]:
    """Load every plugin that is not switched off; one that fails is complained of once, not once a hook."""
    complained: set[object] = set()
    for listing in listings(switches):
        if listing.state in (HookState.DISABLED, HookState.NOT_ALLOWED):
            continue
        subject = listing.name if listing.state is HookState.CLASH else (listing.target, listing.distribution)
        if subject in complained:
            continue
        try:
            if listing.state is HookState.CLASH:
                raise HookNameClashError(f"the hook name {listing.name!r} is ambiguous: {listing.reason}")
            offer = load_offer(listing)
        except (HookNameClashError, PluginLoadError) as error:
            complained.add(subject)
            _complain(error, switches)
        else:
            yield listing, offer


def _priority(hook: object) -> float:
    priority = getattr(hook, "priority", _DEFAULT_PRIORITY)
    return priority if isinstance(priority, int | float) else _DEFAULT_PRIORITY


def _complain(error: Exception, switches: Switches) -> None:
    """Raise an error in strict mode, or else warn of it, with the notes it carries."""
    if switches.strict:
        raise error
    text = str(error)
    if not isinstance(error, PluginLoadError | LookupError):
        text = f"{type(error).__name__}: {error}"
    warnings.warn(" ".join([text, *getattr(error, "__notes__", ())]), PluginWarning, stacklevel=3)
