"""What the packaging tests share: the distributions, a copy of the clone, its wheels, and a registry that listens."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.message import Message
from email.parser import Parser
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Distribution:
    """One distribution of the repository, as a user is promised it."""

    folder: str
    package: str
    entry_points: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "nvalchemi-hooks" if self.extra is None else f"nvalchemi-hooks-{self.extra}"

    @property
    def extra(self) -> str | None:
        return None if self.folder == "core" else self.folder.removeprefix("plugins/")


CORE = Distribution("core", "nvalchemi")
PLUGINS = (
    Distribution(
        "plugins/checkpoint", "nvalchemi_hooks_checkpoint", {"checkpoint": "nvalchemi_hooks_checkpoint.plugin"}
    ),
    Distribution(
        "plugins/distributed",
        "nvalchemi_hooks_distributed",
        {"ddp": "nvalchemi_hooks_distributed.plugin", "fsdp": "nvalchemi_hooks_distributed.plugin"},
    ),
    Distribution("plugins/ema", "nvalchemi_hooks_ema", {"ema": "nvalchemi_hooks_ema.plugin"}),
    Distribution(
        "plugins/grad-accum", "nvalchemi_hooks_grad_accum", {"grad_accum": "nvalchemi_hooks_grad_accum.plugin"}
    ),
    Distribution("plugins/grad-clip", "nvalchemi_hooks_grad_clip", {"grad_clip": "nvalchemi_hooks_grad_clip.plugin"}),
    Distribution(
        "plugins/loss-scaling",
        "nvalchemi_hooks_loss_scaling",
        {
            "loss_scaling": "nvalchemi_hooks_loss_scaling.plugin",
            "mixed_precision": "nvalchemi_hooks_loss_scaling.plugin",
        },
    ),
    Distribution(
        "plugins/scaler-veto", "nvalchemi_hooks_scaler_veto", {"scaler_veto": "nvalchemi_hooks_scaler_veto.plugin"}
    ),
    Distribution("plugins/triton", "nvalchemi_hooks_triton", {"triton": "nvalchemi_hooks_triton.plugin"}),
)


@pytest.fixture(scope="session")
def distributions() -> tuple[Distribution, ...]:
    """Every distribution, the core first."""
    return (CORE, *PLUGINS)


@pytest.fixture(params=(CORE, *PLUGINS), ids=lambda one: one.name)
def distribution(request: pytest.FixtureRequest) -> Distribution:
    """Each distribution in turn."""
    return request.param


@pytest.fixture(params=PLUGINS, ids=lambda one: one.name)
def plugin(request: pytest.FixtureRequest) -> Distribution:
    """Each plugin in turn."""
    return request.param


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def version(root: Path) -> str:
    """The version all distributions share."""
    return (root / "VERSION").read_text().strip()


def quiet_environment(**more: str) -> dict[str, str]:
    """Return an environment in which pip knows no registry, file or proxy but those it is told."""
    kept = {key: value for key, value in os.environ.items() if not key.upper().startswith(("PIP_", "PYTHON"))}
    kept = {key: value for key, value in kept.items() if not key.lower().endswith("_proxy")}
    kept.pop("NVALCHEMI_RELEASE", None)
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **more}


class Runner:
    """Run this interpreter in a quiet environment and return what it printed."""

    def __call__(self, *arguments: object, cwd: Path | None = None, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=cwd,
            env=quiet_environment(**environment),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{done.args} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="session")
def run() -> Runner:
    """Run Python with these arguments."""
    return Runner()


@pytest.fixture(scope="session")
def clone(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, in a folder whose name has a blank."""
    target = tmp_path_factory.mktemp("packaging") / "a clone"
    for folder in ("core", "plugins"):
        shutil.copytree(root / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__", ".*_cache"))
    shutil.copy(root / "VERSION", target)
    return target


@dataclass(frozen=True)
class Wheel:
    """A built wheel, opened for reading."""

    path: Path

    @property
    def files(self) -> set[str]:
        with zipfile.ZipFile(self.path) as archive:
            return set(archive.namelist())

    def read(self, name: str) -> str:
        with zipfile.ZipFile(self.path) as archive:
            return archive.read(name).decode()

    @property
    def info(self) -> str:
        """The name of the metadata folder."""
        name, version = self.path.name.split("-")[:2]
        return f"{name}-{version}.dist-info"

    @property
    def metadata(self) -> Message:
        return Parser().parsestr(self.read(f"{self.info}/METADATA"))

    @property
    def requirements(self) -> list[str]:
        return self.metadata.get_all("Requires-Dist", [])


class Wheels(dict[str, Wheel]):
    """Distribution name -> wheel."""

    def __init__(self, folder: Path) -> None:
        wheels = {path.name.split("-")[0].replace("_", "-"): Wheel(path) for path in sorted(folder.glob("*.whl"))}
        super().__init__(wheels)
        self.folder = folder


def build_wheels(run: Runner, clone: Path, target: Path, **environment: str) -> Wheels:
    """Build the wheel of every distribution of the clone."""
    sources = [clone / one.folder for one in (CORE, *PLUGINS)]
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", target)
    run("-m", "pip", "wheel", *options, *sources, **environment)
    return Wheels(target)


@pytest.fixture(scope="session")
def clone_wheels(run: Runner, clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    """The wheels that pip builds from a clone."""
    return build_wheels(run, clone, tmp_path_factory.mktemp("clone-wheels"))


@pytest.fixture(scope="session")
def release_wheels(run: Runner, clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    """The wheels of a release build."""
    return build_wheels(run, clone, tmp_path_factory.mktemp("release-wheels"), NVALCHEMI_RELEASE="1")


def stand_in(folder: Path, name: str, version: str, files: dict[str, str] | None = None) -> None:
    """Write a wheel that holds next to nothing into ``folder``."""
    stem = f"{name.replace('-', '_')}-{version}"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        for path, text in (files or {}).items():
            archive.writestr(path, text)
        archive.writestr(f"{stem}.dist-info/METADATA", metadata)
        archive.writestr(f"{stem}.dist-info/WHEEL", wheel)
        archive.writestr(f"{stem}.dist-info/RECORD", "")


class Registry:
    """A registry on this machine that serves stand-ins and remembers which projects it was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        handler = partial(_Handler, self)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/"

    def offer(self, name: str, version: str, files: dict[str, str] | None = None) -> None:
        """Serve a stand-in for ``name``."""
        stand_in(self.folder / name, name, version, files)

    def __enter__(self) -> Registry:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(SimpleHTTPRequestHandler):
    """Directory listings are all that pip needs from a registry."""

    def __init__(self, registry: Registry, *arguments: object) -> None:
        self.registry = registry
        super().__init__(*arguments, directory=str(registry.folder))

    def do_GET(self) -> None:
        self.registry.asked.append(self.path.strip("/").split("/")[0])
        super().do_GET()

    def log_message(self, *_: object) -> None:
        """Stay silent."""


@pytest.fixture
def registry(tmp_path: Path, version: str, release_wheels: Wheels) -> Iterator[Registry]:
    """A registry with what we depend on, and with strangers' packages under our names."""
    with Registry(tmp_path / "registry") as registry:
        for name, lowest in third_party(release_wheels).items():
            registry.offer(name, lowest)
        for one in (CORE, *PLUGINS):
            registry.offer(one.name, version, {"stranger.py": ""})
        yield registry


def third_party(wheels: Wheels) -> dict[str, str]:
    """Return every project the wheels ask for that is not ours, with the lowest version they accept."""
    from packaging.requirements import Requirement

    requirements = [Requirement(line) for wheel in wheels.values() for line in wheel.requirements]
    floors = {
        requirement.name: specifier.version
        for requirement in requirements
        for specifier in requirement.specifier
        if specifier.operator == ">="
    }
    return {name: floor for name, floor in floors.items() if name not in wheels}
