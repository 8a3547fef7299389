"""The lazy doors: a package whose public names are imported when they are asked for."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from nvalchemi.official import OFFICIAL_HOOKS, OfficialHook

__all__ = ["door"]


def door(
    package: str, homes: Mapping[str, str], *, official_hooks: bool = False
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the ``__getattr__`` and ``__dir__`` of a package that imports nothing by itself.

    ``__all__`` comes from the same ``__getattr__``, so that it is right whatever gets installed while Python runs.

    Parameters
    ----------
    package : str
        ``__name__`` of the package.
    homes : mapping of str to str
        Public name to the module that defines it.
    official_hooks : bool
        Whether the official hook classes are public names too: those that are installed are listed, the others raise an
        ImportError that says what to install.

    Returns
    -------
    __getattr__, __dir__ : callables
        To be bound to these names in the package.

    Examples
    --------
    >>> __getattr__, __dir__ = door("json", {"loads": "json.decoder", "JSONDecoder": "json.decoder"})
    >>> __dir__()
    ['JSONDecoder', 'loads']
    >>> __getattr__("JSONDecoder").__module__
    'json.decoder'
    """
    official = {hook.class_name: hook for hook in OFFICIAL_HOOKS} if official_hooks else {}

    def names() -> list[str]:
        return sorted([*homes, *(name for name, hook in official.items() if _is_installed(hook.module))])

    def getattribute(name: str) -> Any:
        if name == "__all__":
            return names()
        if name in official:
            value = _import_official(official[name])
        elif name in homes:
            value = getattr(importlib.import_module(homes[name]), name)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    return getattribute, names


def _is_installed(module: str) -> bool:
    """Whether there is a module to import; a bare folder without code, left behind by an uninstall, is none."""
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # the module is imported and has no spec: somebody put it there by hand
        return True
    return spec is not None and spec.origin is not None


def _import_official(hook: OfficialHook) -> object:
    """Import an official class, or say what to install; the own error of an installed plugin is raised as it is."""
    from nvalchemi.errors import HookNotInstalledError, PluginLoadError

    if not _is_installed(hook.module):
        raise HookNotInstalledError(
            f"{hook.class_name} is in the distribution {hook.distribution}, which is not installed: "
            f"{hook.install_command}",
            name=hook.module,
        )
    try:
        module: ModuleType = importlib.import_module(hook.module)
        return getattr(module, hook.class_name)
    except AttributeError as error:  # `from door import X` would replace it, and its cause, by a text of Python's own
        raise PluginLoadError(
            f"{hook.class_name} cannot be imported from {hook.module} of the installed {hook.distribution}: {error}. "
            f"Bring both to one version: {hook.install_command} --upgrade",
            name=hook.module,
        ) from error
    except Exception as error:  # noted and raised again, with its own type and cause
        error.add_note(f"While importing {hook.class_name} from the installed distribution {hook.distribution}.")
        raise
