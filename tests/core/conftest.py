"""Fake distributions on a temporary path: what discovery would find in an environment made for the test."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import importlib_metadata
import pytest

from nvalchemi.hooks import refresh_hooks

SWITCHES = ("NVALCHEMI_HOOKS_DISABLE", "NVALCHEMI_HOOKS_ALLOW", "NVALCHEMI_HOOKS_STRICT")

PLUGIN = """
from nvalchemi.hooks import HookOffer, hookimpl


class Made:
    frequency = 1
    stage = None

    def __init__(self, **kwargs):
        self.kwargs = kwargs
        self.priority = kwargs.get("priority", 50)

    def __call__(self, ctx, stage):
        pass


@hookimpl
def nvalchemi_hooks():
    return [HookOffer(name, Made, default_kwargs={default_kwargs!r}) for name in {names!r}]
"""


class FakeSite:
    """A folder on the path with distributions in it; metadata of anything else is out of sight."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.roots = [path]
        self.refreshes = True
        self.order: Callable[[Iterable[Any]], Iterable[Any]] = list
        path.mkdir(parents=True, exist_ok=True)

    def add(
        self,
        distribution: str,
        version: str = "1.0",
        *,
        hooks: Mapping[str, str] | None = None,
        modules: Mapping[str, str] | None = None,
        requires: Iterable[str] = (),
        egg_info: bool = False,
        root: Path | None = None,
    ) -> Path:
        """Install a distribution: its metadata folder, and modules given as {dotted name: source}."""
        root = root or self.path
        stem = distribution.replace("-", "_")
        folder = root / (f"{stem}.egg-info" if egg_info else f"{stem}-{version}.dist-info")
        folder.mkdir(parents=True, exist_ok=True)
        lines = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
        lines += [f"Requires-Dist: {line}" for line in requires]
        text = "\n".join([*lines, "", "Name: not a header any more", ""])
        (folder / ("PKG-INFO" if egg_info else "METADATA")).write_text(text)
        if hooks:
            points = "\n".join(f"{name} = {target}" for name, target in hooks.items())
            (folder / "entry_points.txt").write_text(f"[console_scripts]\nx = y:z\n\n[nvalchemi.hooks]\n{points}\n")
        for name, source in (modules or {}).items():
            self.write_module(name, source, root)
        if self.refreshes:
            refresh_hooks()
        return folder

    def add_plugin(
        self,
        distribution: str,
        names: Iterable[str],
        version: str = "1.0",
        *,
        default_kwargs: Mapping[str, Any] | None = None,
        requires: Iterable[str] = (),
        root: Path | None = None,
    ) -> str:
        """Install a distribution with a working plugin that offers `names`; return the plugin's module."""
        names = list(names)
        module = f"{distribution.replace('-', '_')}.plugin"
        source = PLUGIN.format(names=names, default_kwargs=default_kwargs)
        self.add(
            distribution,
            version,
            hooks=dict.fromkeys(names, module),
            modules={module: source},
            requires=requires,
            root=root,
        )
        return module

    def write_module(self, name: str, source: str, root: Path | None = None) -> None:
        """Write a module, with an empty ``__init__`` in each package above it."""
        *packages, leaf = name.split(".")
        folder = root or self.path
        for package in packages:
            folder = folder / package
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").touch()
        (folder / f"{leaf}.py").write_text(textwrap.dedent(source))

    def distributions(self, real: Callable[..., Iterable[Any]], name: str | None = None) -> Iterator[Any]:
        """Yield the metadata folders, each root's in the order that `order` gives them."""
        for root in self.roots:
            criteria = {} if name is None else {"name": name}
            yield from self.order(list(real(path=[str(root)], **criteria)))

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run Python in a process of its own, with the folder on its path."""
        path = os.pathsep.join(filter(None, [*map(str, self.roots), os.environ.get("PYTHONPATH", "")]))
        clean = {key: value for key, value in os.environ.items() if key not in SWITCHES}
        return subprocess.run(
            [sys.executable, *arguments],
            env={**clean, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSite]:
    """An environment that holds what the test puts into it, and nothing else."""
    made = FakeSite(tmp_path / "site")
    real = importlib_metadata.distributions
    monkeypatch.setattr(importlib_metadata, "distributions", lambda name=None: made.distributions(real, name))
    monkeypatch.syspath_prepend(str(made.path))
    for switch in SWITCHES:
        monkeypatch.delenv(switch, raising=False)
    before = set(sys.modules)
    refresh_hooks()
    yield made
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
    monkeypatch.undo()
    refresh_hooks()
