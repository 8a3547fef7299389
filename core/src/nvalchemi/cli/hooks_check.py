"""``nvalchemi hooks check``: a first look at a hook, for its author."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nvalchemi.cli.inputs import keyword_arguments
from nvalchemi.cli.output import coloured, print_json
from nvalchemi.cli.parsers import add_command

if TYPE_CHECKING:
    from nvalchemi.cli.author_checks import Answer
    from nvalchemi.cli.parsers import Subparsers

__all__ = ["add_to", "run"]

_DESCRIPTION = """\
Look at a hook as its author would before a release: is it found, offered, described, cheap to list, made, and a hook
at all? Nothing is trained. This does not replace the conformance kit, which trains with the hook: a test file with
nvalchemi.testing.HookConformance in it does, and `nvalchemi hooks new` writes one.
"""

_EPILOG = """\
what is looked at, in this order
  range     it declares which versions of nvalchemi-hooks it is for, and this is one of them
  metadata  summary, licence, supported Python and description are there
  offer     the entry point resolves, the @hookimpl is there, the offers are the declared names
  light     neither a list of hooks nor the plugin's module imports torch
  made      it can be made, with the default arguments of its offer and with --arguments
  hook      a strategy would take what is made
Of a class, module:Class, it is whether it can be imported, made and registered.

exit codes:
  0  everything that could be asked holds
  1  something does not, or there is nothing of that name
  2  the command line was not understood

examples:
  nvalchemi hooks check grad_noise
  nvalchemi hooks check acme-hooks:grad_noise
  nvalchemi hooks check acme_hooks.noise:GradNoiseHook
"""


def add_to(commands: Subparsers) -> None:
    """Add the command to the words of ``nvalchemi hooks``."""
    parser = add_command(
        commands,
        "check",
        help="for authors: is a hook found, offered, described, cheap to list, and a hook at all",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("target", metavar="TARGET", help="a hook's name, distribution:name, or module:Class")
    parser.add_argument(
        "--arguments", metavar="JSON", default="{}", help="keyword arguments to make it with, as a JSON object"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a JSON array for a program: check, holds (null: not asked), sentence, fault, remedy",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Ask, and print the answers as they come; 1 if anything does not hold."""
    from nvalchemi.cli.author_checks import answers_for

    answers = []
    for answer in answers_for(options.target, keyword_arguments(options.arguments)):
        answers.append(answer)
        if not options.json:
            _print(answer)
    if options.json:
        print_json([answer.to_json() for answer in answers])
    else:
        held = sum(answer.holds is True for answer in answers)
        print(f"\n{held} of {len(answers)} hold. What it does in training is for the conformance kit to check:")
        print("nvalchemi.testing.HookConformance, in a test file of yours.")
    return 1 if any(answer.holds is False for answer in answers) else 0


def _print(answer: Answer) -> None:
    word, colour = {True: ("holds", "green"), False: ("fails", "red"), None: ("-----", "dim")}[answer.holds]
    print(f"{coloured(word, colour)}  {answer.check:<8}  {answer.sentence}")
    if answer.fault:
        print(f"{'':17}{answer.fault}")
    if answer.remedy and not answer.holds:
        print(f"{'':17}To do: {answer.remedy}.")
