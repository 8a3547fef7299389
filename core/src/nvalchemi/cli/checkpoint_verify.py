"""``nvalchemi checkpoint verify``: whether a checkpoint is what was saved, byte for byte."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nvalchemi.cli.output import print_columns, print_json
from nvalchemi.cli.parsers import add_command

if TYPE_CHECKING:
    from nvalchemi.cli.parsers import Subparsers
    from nvalchemi.training.checkpoint.manifest import Manifest

__all__ = ["add_to", "problems", "run"]

_DESCRIPTION = """\
Compare every file of a checkpoint with the sum that was written down when it was saved. Nothing is loaded.
"""

_NO_FILE = "The manifest names no file for {!r}, which no save leaves out; do not trust it."

_EPILOG = """\
exit codes:
  0  the checkpoint is whole
  1  there is none, or a file of it is missing, truncated or changed
  2  the command line was not understood
"""


def add_to(commands: Subparsers) -> None:
    """Add the command to the words of ``nvalchemi checkpoint``."""
    parser = add_command(
        commands,
        "verify",
        help="whether every file is what was saved",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("root", help="the folder of the checkpoint")
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object for a program: root, whole, and sections with problems"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Check every sum, and print what is wrong; 1 if anything is."""
    from nvalchemi.training.checkpoint.manifest import read_manifest

    found = problems(options.root, read_manifest(options.root), summed=True)
    sections = [{"name": name, "problem": problem} for name, problem in found.items()]
    whole = not any(section["problem"] for section in sections)
    if options.json:
        print_json({"root": str(options.root), "whole": whole, "sections": sections})
    else:
        print_columns([("SECTION", "STATE"), *((s["name"], s["problem"] or "whole") for s in sections)])
    return 0 if whole else 1


def problems(root: str, manifest: Manifest, *, summed: bool) -> dict[str, str]:
    """Return what is wrong with each section, by its name, or an empty string; sums are compared if `summed`."""
    from nvalchemi.errors import CheckpointError
    from nvalchemi.training.checkpoint.manifest import missing_sections, open_section

    found = {name: _NO_FILE.format(name) for name in missing_sections(manifest)}
    for name in manifest.sections:
        try:
            open_section(root, manifest, name, summed=summed).close()
            found[name] = ""
        except CheckpointError as error:
            found[name] = str(error)
    return found
