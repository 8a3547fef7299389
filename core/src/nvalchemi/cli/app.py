"""The command ``nvalchemi``: its words, its exit codes, and what it does when something goes wrong."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from enum import IntEnum

from nvalchemi.cli import (
    checkpoint_show,
    checkpoint_verify,
    hooks_check,
    hooks_doctor,
    hooks_explain,
    hooks_info,
    hooks_list,
    hooks_new,
)
from nvalchemi.cli.parsers import add_group, version_action

__all__ = ["ExitCode", "build_parser", "main"]

_EPILOG = """\
exit codes:
  0    done
  1    could not be done; the reason is on standard error
  2    the command line was not understood
  130  interrupted
  141  whoever read the output went away

examples:
  nvalchemi hooks list              what is installed, and whether it can be used
  nvalchemi hooks list --json       the same for a program
  nvalchemi hooks info ema          everything about one hook
  nvalchemi hooks explain ema,grad_clip    which is called when, and why
  nvalchemi hooks doctor            what is wrong with this environment
  nvalchemi hooks check grad-noise  a first look at a hook of your own
  nvalchemi hooks new grad-noise    the distribution of a hook of your own, ready to be tested
  nvalchemi checkpoint show ROOT    what a checkpoint holds, and whether it would load here
  nvalchemi checkpoint verify ROOT  whether its files are what was saved
"""


class ExitCode(IntEnum):
    """What the process tells the shell."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    INTERRUPTED = 130
    BROKEN_PIPE = 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Without the program's name; those of the process by default.

    Returns
    -------
    int
        An `ExitCode`. A command line that is not understood leaves through ``SystemExit(2)``, as argparse does.
    """
    options = build_parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # As the Python manual advises: standard output is flushed once more at exit, and must have somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.BROKEN_PIPE
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except (ImportError, LookupError, OSError, ValueError) as error:  # what our own messages are written for
        print("nvalchemi: error:", error, *getattr(error, "__notes__", ()), file=sys.stderr)
        return ExitCode.FAILED
    return code


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="nvalchemi",
        description="Training hooks that compose: see what is installed, and what was saved.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=version_action(), help="show the versions of the core and of its hook API")
    words = add_group(parser, "command")
    hooks = words.add_parser("hooks", help="installed hooks", description="Everything about installed hooks.")
    about_hooks = add_group(hooks, "hooks command")
    for command in (hooks_list, hooks_info, hooks_explain, hooks_check, hooks_doctor, hooks_new):
        command.add_to(about_hooks)
    checkpoint = words.add_parser("checkpoint", help="checkpoints", description="Everything about checkpoints.")
    commands = add_group(checkpoint, "checkpoint command")
    checkpoint_show.add_to(commands)
    checkpoint_verify.add_to(commands)
    return parser
