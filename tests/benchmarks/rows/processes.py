"""Importing and listing, each time in a process of its own: nothing is there yet, in Python's caches or in ours."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nvalchemi.testing import FakeSite
from rows.figures import Figure
from rows.targets import TARGETS
from rows.timing import Ratio

__all__ = ["imports", "listings"]

# Imports torch once, and then each statement in forks of that process; prints seconds, and the modules that came along.
_IMPORT = """
import json, os, sys, time
import torch
for statement in {statements!r}:
    for _ in range({rounds}):
        sys.stdout.flush()
        if os.fork():
            os.wait()
            continue
        before = set(sys.modules)
        begin = time.process_time()
        exec(statement)
        seconds = time.process_time() - begin
        print(json.dumps([statement, seconds, sorted(sys.modules.keys() - before)]), flush=True)
        os._exit(0)
"""
_UNWANTED = {"pydantic", "triton", "torch._dynamo"}
_BARE = "import nvalchemi.hooks"
_WHOLE = (
    "import nvalchemi.hooks as hooks; [getattr(hooks, name) for name in dir(hooks)]; "
    "from nvalchemi.training.hooks import TrainingUpdateOrchestrator"
)

# The made-up distributions are all that is found; what finds them is imported before.
_LIST = """
import sys, time, json
import importlib_metadata
from nvalchemi.hooks import list_hooks
real = importlib_metadata.distributions
importlib_metadata.distributions = lambda **criteria: real(path=[{site!r}], **criteria)
def timed(call):
    begin = time.process_time()
    call()
    return time.process_time() - begin
first = timed({call})
print(json.dumps([first, min(timed({call}) for _ in range(20))]))
"""
_OURS = "list_hooks"
_PLAIN = "lambda: importlib_metadata.entry_points(group='nvalchemi.hooks')"


def imports(quick: bool) -> Iterator[Figure]:
    """Measure what importing us adds to importing torch."""
    other = "accelerate"
    there = importlib.util.find_spec(other) is not None
    statements = [_BARE, _WHOLE, *([f"import {other}"] if there else [])]
    lines = _run(_IMPORT.format(statements=statements, rounds=3 if quick else 11))
    found = {one: [line for line in lines if line[0] == one] for one in statements}
    times = {one: _milliseconds([seconds for _, seconds, _ in runs]) for one, runs in found.items()}
    loaded = sorted(_UNWANTED.intersection(name for _, _, names in found[_BARE] for name in names))
    peers = {
        "with every name and the orchestrator": times[_WHOLE].median,
        other: times[f"import {other}"].median if there else None,
    }
    own = times[_BARE]
    broken = f"it loads {', '.join(loaded)}" if loaded else ""
    yield Figure(TARGETS["import"], own.median, (own.low, own.high), peers, broken=broken)


def listings(quick: bool) -> Iterator[Figure]:
    """Measure what it takes to list what is installed, beside a bare look for entry points."""
    rounds = 3 if quick else 11
    for plugins in (0, 10, 200):
        with tempfile.TemporaryDirectory() as folder:
            _fill(FakeSite(Path(folder)), plugins)
            ours, plain = (
                [_run(_LIST.format(site=folder, call=call))[0] for _ in range(rounds)] for call in (_OURS, _PLAIN)
            )
        time, other = (_milliseconds([first for first, _ in one]) for one in (ours, plain))
        beside = {"importlib_metadata": other.median}
        yield Figure(TARGETS[f"list {plugins}"], time.median, (time.low, time.high), beside)
    again = _milliseconds([second for _, second in ours])
    yield Figure(TARGETS["list again"], again.median, (again.low, again.high))


def _fill(site: FakeSite, plugins: int) -> None:
    site.refreshes = False
    for number in range(100):
        headers = {"Summary": "A distribution that has nothing to do with hooks", "License": "MIT"}
        site.add(f"other-{number}", requires=["numpy>=1.26", "packaging"], headers=headers)
    for number in range(plugins):
        name = f"plugin-{number}"
        site.add(name, hooks={f"hook_{number}": f"plugin_{number}.plugin"}, requires=["nvalchemi-hooks>=0.1,<1"])


def _run(code: str) -> list[Any]:
    """Return what a process prints, a line of JSON each."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def _milliseconds(seconds: list[float]) -> Ratio:
    return Ratio.of([1e3 * one for one in seconds])
