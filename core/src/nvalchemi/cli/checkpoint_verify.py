"""``nvalchemi checkpoint verify``: whether a checkpoint is what was saved, byte for byte."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from nvalchemi.cli.output import print_columns, print_json
from nvalchemi.cli.parsers import add_command

if TYPE_CHECKING:
    from nvalchemi.cli.parsers import Subparsers

__all__ = ["add_to", "run"]

_DESCRIPTION = """\
Compare every file of a checkpoint with the sum that was written down when it was saved. Nothing is loaded.
"""

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

    manifest = read_manifest(options.root)
    sections = [{"name": name, "problem": _problem(options.root, manifest, name)} for name in manifest.sections]
    whole = not any(section["problem"] for section in sections)
    if options.json:
        print_json({"root": str(options.root), "whole": whole, "sections": sections})
    else:
        print_columns([("SECTION", "STATE"), *((s["name"], s["problem"] or "whole") for s in sections)])
    return 0 if whole else 1


def _problem(root: str, manifest: Any, name: str) -> str:
    from nvalchemi.errors import CheckpointError
    from nvalchemi.training.checkpoint.manifest import open_section

    try:
        open_section(root, manifest, name).close()
    except CheckpointError as error:
        return str(error)
    return ""
