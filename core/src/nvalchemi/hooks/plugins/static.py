"""Plugins that a program registers itself, where there is no metadata to find them by."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from nvalchemi import metadata
from nvalchemi.errors import PluginLoadError
from nvalchemi.hooks.plugins.catalog import listings
from nvalchemi.hooks.plugins.offers import offers_of
from nvalchemi.hooks.plugins.specs import HookOffer
from nvalchemi.metadata import EntryPointRecord, canonical_name

__all__ = ["offers", "register_plugin"]

offers: dict[tuple[str, str], Mapping[str, HookOffer]] = {}
"""What registered plugins offer, by target and distribution."""


def register_plugin(plugin: object, *, distribution: str | None = None, version: str | None = None) -> None:
    """Offer the hooks of a plugin that discovery cannot find, in an application frozen into one file for example.

    Its hooks are listed, named, switched off and noted in checkpoints like any others, and `refresh_hooks` keeps them.
    Metadata of the same distribution, where there is any, no longer counts. Registering twice is harmless.

    Parameters
    ----------
    plugin : module or object
        What an entry point would name: it has a ``@hookimpl def nvalchemi_hooks()``. A packager sees it because it is
        imported by name.
    distribution : str, optional
        Whose it is; by default the name of its top-level package, with hyphens.
    version : str, optional
        By default what the metadata says, if there is any.

    Raises
    ------
    PluginLoadError
        What it offers is wrong; nothing is registered.

    Examples
    --------
    In the main program, before a strategy is made::

        import nvalchemi_hooks_ema.plugin
        from nvalchemi.hooks import register_plugin

        register_plugin(nvalchemi_hooks_ema.plugin)
    """
    target = _target_of(plugin)
    name = distribution or canonical_name(target.partition(":")[0].partition(".")[0])
    version = version or metadata.version_of(name)
    try:
        offered = offers_of(plugin, target)
    except Exception as error:  # a guest's code may raise anything
        raise PluginLoadError(
            f"the plugin {target} of {name} {version} cannot be registered: {type(error).__name__}: {error}"
        ) from error
    metadata.add_records(EntryPointRecord(offer, target, name, version) for offer in offered)
    offers[target, name] = offered
    listings.cache_clear()


def _target_of(plugin: object) -> str:
    if isinstance(plugin, ModuleType):
        return plugin.__name__
    owner = plugin if isinstance(plugin, type) else type(plugin)
    return f"{owner.__module__}:{owner.__qualname__}"
