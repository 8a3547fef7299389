"""Write the extras of the core: a path to the plugin beside it in a clone, its exact version in a release.

A pinned name alone would make ``pip install './core[ema]'`` ask a registry for a plugin that may not be published, and
install whatever somebody else put there under that name. A path asks nobody. A release must hold no path, so
``NVALCHEMI_RELEASE=1`` pins every plugin to the version of the core.

Two more extras are for authors of hooks, and bring no plugin.

The extra ``triton`` brings triton itself too, 700 MB of it. ``all`` brings the plugin alone: where it is of use, beside
a CUDA build of torch, triton is there already, and elsewhere it would be a load for nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PLUGINS = ("checkpoint", "distributed", "ema", "grad-accum", "grad-clip", "loss-scaling", "scaler-veto", "triton")
FOR_AUTHORS = {
    "new": ["jinja2>=3.1"],  # nvalchemi hooks new
    "testing": ["pytest>=8.4"],  # nvalchemi.testing's conformance kit and fixtures
}


def requirement(plugin: str, version: str, plugins: Path, *, release: bool, own_extra: str = "") -> str:
    """Return what the extra of ``plugin`` installs, with an extra of its own if it has one that is wanted.

    Examples
    --------
    >>> requirement("ema", "0.1.0", Path("/clone/plugins"), release=True)
    'nvalchemi-hooks-ema==0.1.0'
    """
    name = f"nvalchemi-hooks-{plugin}{own_extra}"
    folder = plugins / plugin
    if release or not (folder / "pyproject.toml").is_file():
        return f"{name}=={version}"
    return f"{name} @ {folder.as_uri()}"


def is_release() -> bool:
    """Return whether ``NVALCHEMI_RELEASE`` asks for a release build; refuse what is neither 0 nor 1."""
    value = os.environ.get("NVALCHEMI_RELEASE", "0")
    if value not in {"0", "1"}:
        raise ValueError(f"NVALCHEMI_RELEASE is {value!r}; set it to 1 for a release build, or leave it out")
    return value == "1"


class ExtrasHook(MetadataHookInterface):
    """One extra a plugin, ``all`` of them, and those for authors."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in ``optional-dependencies``; an sdist carries them already, and never comes here."""
        plugins = Path(self.root).resolve().parent / "plugins"
        release = is_release()
        version = metadata["version"]
        extras = {plugin: [requirement(plugin, version, plugins, release=release)] for plugin in PLUGINS}
        every = [one for extra in extras.values() for one in extra]
        extras["triton"] = [requirement("triton", version, plugins, release=release, own_extra="[triton]")]
        metadata["optional-dependencies"] = {**extras, "all": every, **FOR_AUTHORS}
