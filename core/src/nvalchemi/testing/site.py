"""Made-up distributions on a temporary path: what discovery would find in an environment made for the test."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import importlib_metadata

from nvalchemi.hooks import refresh_hooks

__all__ = ["FakeSite"]

_SWITCHES = tuple(f"NVALCHEMI_HOOKS_{switch}" for switch in ("DISABLE", "ALLOW", "STRICT", "TRACE"))

_PLUGIN = """
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
    """A folder with made-up distributions in it.

    Inside `isolated` (the fixture `fake_site` is there from the beginning) they are what is installed, and the metadata
    of anything else is out of sight; `run` gives a process of its own a path that begins with them.

    Parameters
    ----------
    path : Path
        The folder; it is made.

    Attributes
    ----------
    roots : list of Path
        All folders with distributions, in the order of the path.
    refreshes : bool
        Whether `add` makes discovery look again.
    order : callable
        The order in which a folder's distributions are found; the real one is that of the disk.

    Examples
    --------
    >>> import tempfile
    >>> from nvalchemi.hooks import list_hooks
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     site = FakeSite(Path(folder))
    ...     with site.isolated():
    ...         _ = site.add_plugin("acme-hooks", ["grad_noise"])
    ...         [(hook.name, hook.distribution) for hook in list_hooks()]
    [('grad_noise', 'acme-hooks')]
    """

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
        headers: Mapping[str, str] | None = None,
        egg_info: bool = False,
        root: Path | None = None,
    ) -> Path:
        """Install a distribution.

        Parameters
        ----------
        distribution, version : str
            Its name and version.
        hooks : mapping of str to str, optional
            Its entry points: hook name to ``module`` or ``module:object``.
        modules : mapping of str to str, optional
            Its code: dotted name to source.
        requires : iterable of str
            Its ``Requires-Dist`` lines.
        headers : mapping of str to str, optional
            More lines of its metadata, ``{"Summary": "..."}`` for example.
        egg_info : bool
            Write the metadata as setuptools once did.
        root : Path, optional
            Another folder than `path`; put it into `roots` as well.

        Returns
        -------
        Path
            The metadata folder.
        """
        root = root or self.path
        stem = distribution.replace("-", "_")
        folder = root / (f"{stem}.egg-info" if egg_info else f"{stem}-{version}.dist-info")
        folder.mkdir(parents=True, exist_ok=True)
        lines = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
        lines += [f"Requires-Dist: {line}" for line in requires]
        lines += [f"{key}: {value}" for key, value in (headers or {}).items()]
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
        source = _PLUGIN.format(names=names, default_kwargs=default_kwargs)
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

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run Python in a process of its own, with the folder on its path."""
        path = os.pathsep.join(filter(None, [*map(str, self.roots), os.environ.get("PYTHONPATH", "")]))
        clean = {key: value for key, value in os.environ.items() if key not in _SWITCHES}
        return subprocess.run(
            [sys.executable, *arguments],
            env={**clean, "PYTHONPATH": path, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    @contextlib.contextmanager
    def isolated(self) -> Iterator[FakeSite]:
        """Make these distributions all that discovery finds, with no switch set; afterwards all is as it was."""
        before = set(sys.modules)
        environment = {key: value for key, value in os.environ.items() if key not in _SWITCHES}
        real = importlib_metadata.distributions
        try:
            with (
                mock.patch.object(importlib_metadata, "distributions", lambda name=None: self._found(real, name)),
                mock.patch.object(sys, "path", [str(self.path), *sys.path]),
                mock.patch.dict(os.environ, environment, clear=True),
            ):
                refresh_hooks()
                yield self
        finally:
            for name in set(sys.modules) - before:
                if str(getattr(sys.modules[name], "__file__", "")).startswith(tuple(map(str, self.roots))):
                    del sys.modules[name]
            refresh_hooks()

    def _found(self, real: Callable[..., Iterable[Any]], name: str | None) -> Iterator[Any]:
        criteria = {} if name is None else {"name": name}
        for root in self.roots:
            yield from self.order(list(real(path=[str(root)], **criteria)))
