"""What goes wrong where plugins are found."""

from __future__ import annotations

import importlib.metadata

import pluggy

__all__ = ["AsksTheDiskEachTime", "KeepsTheFirstOfAName", "LoadsAllAtOnce", "LoadsEveryVersion", "ReadsEveryFolder"]

GROUP = "nvalchemi.hooks"


class LoadsAllAtOnce:
    """All plugins are loaded in one go, which the first broken one ends for all."""

    @staticmethod
    def activate():
        """Return the names of all hooks."""
        manager = pluggy.PluginManager("nvalchemi")
        manager.load_setuptools_entrypoints(GROUP)
        return sorted(offer.name for plugin in manager.get_plugins() for offer in plugin.nvalchemi_hooks())


class ReadsEveryFolder:
    """Every metadata folder counts, so a plugin that left two behind is there twice."""

    @staticmethod
    def activate():
        """Return the names of all hooks."""
        found = importlib.metadata.distributions()
        points = [point for one in found for point in one.entry_points if point.group == GROUP]
        return [point.name for point in points if point.value.startswith("acme")]


class KeepsTheFirstOfAName:
    """Of two distributions that offer one name the first on the path is taken, and nothing is said."""

    @staticmethod
    def one(name):
        """Return the hook of a name."""
        return next(point for point in importlib.metadata.entry_points(group=GROUP) if point.name == name)


class LoadsEveryVersion:
    """A plugin is loaded whatever version of the core it was made for, and fails at an argument that is gone."""

    @staticmethod
    def activate():
        """Return the names of all hooks."""
        points = importlib.metadata.entry_points(group=GROUP)
        return sorted(offer.name for point in points for offer in point.load().nvalchemi_hooks())


class AsksTheDiskEachTime:
    """Whoever needs a hook reads the metadata of every installed package again, and loads whatever it finds."""

    program = """
    import importlib.metadata, sys
    scans = []
    real = importlib.metadata.entry_points
    importlib.metadata.entry_points = lambda **criteria: scans.append(1) or real(**criteria)
    known = [point.name for point in importlib.metadata.entry_points(group="nvalchemi.hooks")]
    at_import = len(scans)
    for trainer in range(2):
        plugins = [point.load() for point in importlib.metadata.entry_points(group="nvalchemi.hooks")]
    print(at_import, len(scans), "other_hooks.plugin" in sys.modules)
    """
