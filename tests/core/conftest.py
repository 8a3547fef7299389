"""What the tests of discovery share with every author of a hook, and how a stranger's distribution gets here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nvalchemi.testing import fake_site as site  # noqa: F401 - a fixture


class Installed:
    """A distribution, built as a wheel and installed into a folder of its own; it is on the path of what is run."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.wheels, self.site = folder / "wheels", folder / "site"
        ours = ("-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input")
        alone = ("--no-index", "--no-deps", "--no-build-isolation")
        self.run(*ours, "wheel", *alone, "-w", self.wheels, source)
        self.run(*ours, "install", "--no-index", "--no-deps", "--target", self.site, *self.wheels.glob("*.whl"))

    def run(self, *arguments: object, cwd: Path | None = None) -> str:
        """Run Python and return what it printed."""
        path = os.pathsep.join(filter(None, [str(self.site), os.environ.get("PYTHONPATH", "")]))
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="session")
def install(tmp_path_factory) -> Callable[[Path], Installed]:
    """Build and install a distribution from its source, beside what is installed already."""
    return lambda source: Installed(source, tmp_path_factory.mktemp("installed"))
