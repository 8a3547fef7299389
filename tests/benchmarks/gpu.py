"""Check and time every path of an update on a GPU, in under five minutes.

    python tests/benchmarks/gpu.py                  needs an NVIDIA GPU; exits with 2 without one
    python tests/benchmarks/gpu.py --json FILE      the same figures for a program
    python tests/benchmarks/gpu.py --device cpu     a rehearsal of the script on tiny sizes; its times mean nothing

It shows, in this order: that all paths give the same numbers (folded, lazy, plain, torch's own parts, the one-pass
Triton kernels), how often the host waits for the device in a step (`torch.cuda.set_sync_debug_mode`: "error" where it
must not), at which rate the device copies memory, and how long an update of 1M, 100M and 1B float32 parameters in 200
tensors takes, beside the time that its bytes take at that rate. On an H200 the rows of 100M are held against their
targets. Sizes that do not fit are left out, and said so. A whole batch, forward and backward included, is captured in
a CUDA graph, compared with the same batch uncaptured, watched for waits in a replay, and timed beside it; on a CPU a
stand-in takes the place of the graph.

The paths on CUDA are untested until somebody has run this. JSON is that of run.py; it exits with 1 if a row misses.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SIZES = {"cuda": [1_000_000, 100_000_000, 1_000_000_000], "cpu": [2_000]}
COPIED = {"cuda": 4 << 30, "cpu": 4 << 20}  # bytes: many times what a cache holds


def main() -> int:
    """Say whether there is a GPU, and go to work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--device", choices=sorted(SIZES), default="cuda", help="cpu: a rehearsal on tiny sizes")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # has to be there before triton is imported, as by the rows
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"There is no GPU that torch {torch.__version__} sees. --device cpu rehearses this.", file=sys.stderr)
        return 2
    return measure(torch.device(options.device), options.json)


def measure(device: torch.device, written: Path | None) -> int:
    """Check, time, print and write; return 1 if a row misses its target, else 0."""
    import torch
    from rich.console import Console
    from rows.captured import captured
    from rows.equality import equality, host_reads
    from rows.figures import as_table, missed, write_json
    from rows.floors import copy_rate, floors

    progress, console = Console(stderr=True), Console(width=None if sys.stdout.isatty() else 140)
    progress.print("equality, host reads ...")
    figures = [*equality(device), *host_reads(device), *captured(device)]
    rate = copy_rate(device, COPIED[device.type])
    for figure in floors(device, SIZES[device.type], rate):
        progress.print(f"{figure.target.row} ...")
        figures.append(figure)
    if written:
        write_json(figures, written)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU, for rehearsal"
    console.print(f"torch {torch.__version__} on {name}; it copies {rate / 1e12:.2f} TB/s, read and written")
    console.print(as_table(figures))
    console.print(f"{len(missed(figures))} of {len(figures)} rows miss their target")
    return 1 if missed(figures) else 0


if __name__ == "__main__":
    sys.exit(main())
