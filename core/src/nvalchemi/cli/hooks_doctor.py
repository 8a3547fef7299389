"""``nvalchemi hooks doctor``: what is wrong with an environment."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from nvalchemi.cli.output import coloured, print_json
from nvalchemi.cli.parsers import add_command

if TYPE_CHECKING:
    from nvalchemi.cli.parsers import Subparsers

__all__ = ["add_to", "run"]

_DESCRIPTION = """\
Find what is wrong with the hooks of this environment, and say what to do about it. No plugin is imported.
"""

_EPILOG = """\
what is looked for
  duplicate   a distribution that is installed more than once
  gone        an entry point whose module is not there
  clash       a hook name that several distributions offer
  range       a plugin that was made for another version of nvalchemi-hooks
  extra       nvalchemi-hooks[...] with an extra that there is not: installers leave it out without an error
  toolkit     nvalchemi-toolkit, which brings a package of the same name
  switch      a name in NVALCHEMI_HOOKS_DISABLE or NVALCHEMI_HOOKS_ALLOW that no hook has
  checkpoint  a distribution that the hooks of a checkpoint come from and that is not installed

exit codes:
  0  nothing was found
  1  something was, or what was to be looked at cannot be read
  2  the command line was not understood

examples:
  nvalchemi hooks doctor
  nvalchemi hooks doctor --requirements requirements.txt      its extras too
  nvalchemi hooks doctor --checkpoint runs/step-00001000      is what it needs here?
"""


def add_to(commands: Subparsers) -> None:
    """Add the command to the words of ``nvalchemi hooks``."""
    parser = add_command(
        commands,
        "doctor",
        help="what is wrong with this environment, and what to do about it",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("--checkpoint", metavar="ROOT", help="the folder of a checkpoint that is to be loaded here")
    parser.add_argument(
        "--requirements", metavar="FILE", type=Path, help="a requirements.txt or pyproject.toml to look at as well"
    )
    parser.add_argument(
        "--json", action="store_true", help="print a JSON array for a program: kind, subject, problem, remedy"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what was found; 1 if anything was."""
    from nvalchemi.cli.ailments import bad_extras, find_ailments, missing_for_checkpoint
    from nvalchemi.cli.extras import read_requirements

    found = list(find_ailments())
    if options.requirements:
        found += bad_extras(read_requirements(options.requirements), str(options.requirements))
    if options.checkpoint:
        found += missing_for_checkpoint(options.checkpoint)
    if options.json:
        print_json([asdict(one) for one in found])
    elif not found:
        print(f"{coloured('Nothing is wrong', 'green')} with the hooks of this environment, as far as metadata tells.")
    for one in () if options.json else found:
        end = "" if one.problem.endswith("?") else "."
        print(f"{coloured(one.kind, 'red')}: {one.problem}{end}\n  To do: {one.remedy}.")
    return 1 if found else 0
