"""Each law is tested twice: it holds for ours, and a naive way to do the same is caught breaking it.

A test marked with ``fault`` gets `way`, the implementation under test: the plugins, as a user composes them, or the
class of `naive` that the mark names. The naive one has to fail, and its failure has to show the wrong value that the
mistake gives. Where it is a `Loop` with one mistake in it, the loop without the mistake has to pass. Both are asked in
the first variant of a test, ours in all of them.
"""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import re
import runpy
import sys
import warnings
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from nvalchemi.testing import fake_site as site  # noqa: F401 - a fixture

FOLDER = Path(__file__).parent
WAYS = ["ours", "naive", "by hand"]


def load(name: str) -> ModuleType:
    """Import a package of this folder, which is on no path."""
    full = f"known_faults_{name}"
    if full not in sys.modules:
        place = FOLDER / name
        spec = importlib.util.spec_from_file_location(
            full, place / "__init__.py", submodule_search_locations=[str(place)]
        )
        sys.modules[full] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[full]


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "fault(naive, shows, raises=AssertionError, needs=(), ours='Run'): a known fault; the class of naive/ that "
        "makes it, what its failure shows, and the plugins that the law needs",
    )


def pytest_generate_tests(metafunc):
    if "way" in metafunc.fixturenames:
        metafunc.parametrize("way", WAYS, indirect=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Ask the naive way, and the careful loop, once for each test."""
    asked, kept, left_out = set(), [], []
    for item in items:
        way = item.callspec.params.get("way", "ours") if hasattr(item, "callspec") else "ours"
        key = (item.location[0], item.originalname, way) if way != "ours" else item
        (left_out if key in asked or (way == "by hand" and not is_loop(item)) else kept).append(item)
        asked.add(key)
    items[:] = kept
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def is_loop(item) -> bool:
    """Whether the naive way of a test is a loop with one mistake in it."""
    naive = load("naive")
    fault = item.get_closest_marker("fault").kwargs
    return fault.get("careful", True) and issubclass(getattr(naive, fault["naive"]), naive.Loop)


@pytest.fixture
def way(request):
    """The implementation that the law is asked of."""
    fault = request.node.get_closest_marker("fault").kwargs
    for plugin in fault.get("needs", ()):
        require(plugin)
    if request.param == "ours":
        return getattr(load("ours"), fault.get("ours", "Run"))
    return getattr(load("naive"), "Loop" if request.param == "by hand" else fault["naive"])


def require(plugin: str) -> None:
    """Skip where a plugin is not installed: the environments of single plugins run what concerns them."""
    try:
        distribution(f"nvalchemi-hooks-{plugin}")
    except PackageNotFoundError:
        pytest.skip(f"nvalchemi-hooks-{plugin} is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    params = pyfuncitem.callspec.params if hasattr(pyfuncitem, "callspec") else {}
    if params.get("way", "ours") == "ours":
        return (yield)
    with warnings.catch_warnings(action="ignore"):  # what torch says of mistakes is not what these tests are about
        if params["way"] == "by hand":
            return (yield)
        with caught(pyfuncitem):
            yield
    return True


def caught(pyfuncitem):
    """Expect the failure that a naive way is known for."""
    fault = pyfuncitem.get_closest_marker("fault").kwargs
    return pytest.raises(fault.get("raises", AssertionError), match=re.escape(fault["shows"]))


class Point(nn.Module):
    """Parameters whose gradients are chosen: a batch names the gradient of each that gets one."""

    def __init__(self, dtype: torch.dtype = torch.float32, **values: object) -> None:
        super().__init__()
        for name, value in values.items():
            tensor = value.clone() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=dtype)
            self.register_parameter(name, nn.Parameter(tensor))

    def forward(self, gradients: dict[str, object]) -> torch.Tensor:
        """Return a scalar with these gradients."""
        terms = [
            (getattr(self, name) * torch.as_tensor(gradient, dtype=getattr(self, name).dtype)).sum().float()
            for name, gradient in gradients.items()
        ]
        return torch.stack(terms).sum()


@pytest.fixture
def point() -> type[Point]:
    """A model whose gradients the test chooses."""
    return Point


@pytest.fixture(autouse=True)
def _as_it_was():
    """What a naive way leaves behind in torch's global state is put back."""
    threads, seed = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    yield
    torch.set_autocast_enabled("cpu", False)
    torch.clear_autocast_cache()
    torch.set_rng_state(seed)
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    """The results of what two processes did together; they are started for the first test that asks, once for all."""
    if not torch.distributed.is_available():
        pytest.skip("this build of torch has no torch.distributed")
    folder = functools.cache(lambda: trained_by_two(tmp_path_factory.mktemp("two_ranks")))

    def results(job: str) -> list[dict[str, object]]:
        done = [torch.load(folder() / f"{job}{rank}", weights_only=True) for rank in range(2)]
        for one in done:
            if "error" in one:
                raise RuntimeError(one["error"])
        return done

    return results


def trained_by_two(folder: Path) -> Path:
    """Have two processes do all jobs, within a minute."""
    spawn = multiprocessing.get_context("spawn")
    script = str(FOLDER / "two_ranks.py")
    ranks = [
        spawn.Process(target=runpy.run_path, args=(script, {"rank": rank, "folder": folder}, "__main__"))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        if rank.is_alive():
            rank.kill()
    return folder


@pytest.fixture
def ours():
    """The run of a strategy, for what concerns ours alone."""
    return load("ours").Run


@pytest.fixture
def need():
    """Skips where a plugin that a test needs is not installed."""

    def of(*plugins: str) -> None:
        for plugin in plugins:
            require(plugin)

    return of
