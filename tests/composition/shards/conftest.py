"""Groups of gloo ranks, each started once for all the checks that want it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("ranks.py")
LIMIT = 60  # seconds a check; a group that hangs is ended


def start(folder, size, *names):
    """Run checks on ranks that are started for them; what each rank saw, by the name of the check."""
    command = [sys.executable, str(WORKER)]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(folder), *names],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        answers = [process.communicate(timeout=LIMIT * len(names))[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started), answers
    found = {name: [folder / f"{name}-{rank}-of-{size}" for rank in range(size)] for name in names}
    return {name: [torch.load(path) for path in paths if path.exists()] for name, paths in found.items()}


@pytest.fixture(scope="package")
def alone():
    """The same functions in this process, which is alone and has the whole batch."""
    spec = importlib.util.spec_from_file_location("ranks_of_shards", WORKER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="package")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="package")
def two(folder):
    """What two ranks saw."""
    return start(folder, 2, "trained", "unfused", "saved", "loaded", "failures", "hooked", "hooked_twice", "counted")


@pytest.fixture(scope="package")
def four(two, folder):
    """What four ranks saw, after the two had saved."""
    return start(folder, 4, "trained", "loaded")


@pytest.fixture(scope="package")
def killed(folder):
    """What is left to say when one of two ranks dies while it writes."""
    return start(folder, 2, "one_is_killed")
