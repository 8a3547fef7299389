"""Measure every target that needs no GPU, and print it beside what is reached today.

    python tests/benchmarks/run.py                  some minutes
    python tests/benchmarks/run.py --quick          under a minute: fewer rounds, wider spread, smaller company
    python tests/benchmarks/run.py --json FILE      the same figures for a program

A number in the column "at most" is the target; one in parentheses beside it is what a reckless loop written by hand
would come to. Ratios are medians over interleaved pairs, with their quartiles; counts are exact. Figures in
milliseconds depend on the machine, ratios hardly, counts not at all. Rows of a GPU are measured by gpu.py beside this
file.

Others are measured in the same run where they are installed, and named where they are not. For all of them, with
--no-deps where torch must stay as it is:

    pip install ema-pytorch torch-ema pytorch-ignite accelerate lightning

JSON: a list of {"row", "value", "target", "holds", "peer"}. "value" and "target" are numbers, and a row holds if the
first is at most the second and nothing else is wrong; both "value" and "holds" are null where nothing was measured.
"peer" has a number for each other that was measured, or "not installed".
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from rows.counts import counts
from rows.dispatch import dispatch
from rows.figures import Figure, as_table, missed, write_json
from rows.loops import loops
from rows.processes import imports, listings
from rows.updates import ema, paths

KINDS: dict[str, Callable[[bool], Iterator[Figure]]] = {
    "exact counts": lambda quick: counts(),
    "whole steps": loops,
    "the average": ema,
    "the update": paths,
    "calling hooks": dispatch,
    "imports": imports,
    "listings": listings,
}


def measure(quick: bool, console: Console) -> list[Figure]:
    """Measure all rows, kind by kind, and say on `console` which is at work."""
    figures: list[Figure] = []
    for name, kind in KINDS.items():
        begin = time.perf_counter()
        with console.status(f"{name} ..."):
            figures += kind(quick)
        console.print(f"{name}: {time.perf_counter() - begin:.0f} s")
    return figures


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--quick", action="store_true", help="under a minute: fewer rounds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # other libraries' own troubles
    logging.disable(logging.WARNING)
    figures = measure(options.quick, Console(stderr=True))
    if options.json:
        write_json(figures, options.json)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(f"torch {torch.__version__}, one thread; ratios: median (quartiles) of the processor's time")
    console.print(as_table(figures))
    console.print(f"{len(missed(figures))} of {len(figures)} rows miss their target")


if __name__ == "__main__":
    main()
