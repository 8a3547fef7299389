"""``nvalchemi hooks new``: the distribution of a hook of one's own, ready to be tested."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from nvalchemi.cli.parsers import add_command

if TYPE_CHECKING:
    from nvalchemi.cli.parsers import Subparsers

__all__ = ["add_to", "run"]

_DESCRIPTION = """\
Write the distribution of a new update hook into a folder: pyproject.toml with its entry point, the hook, the plugin,
a card, tests with the conformance kit, tox.ini, a CI file and a licence. As it comes out it installs, is found by
strategies, and passes its tests.
"""

_EPILOG = """\
exit codes:
  0  written
  1  nothing was written: the name cannot be used, the folder is not empty, or jinja2 is not installed
  2  the command line was not understood

examples:
  nvalchemi hooks new grad-noise                              asks for summary, author and licence
  nvalchemi hooks new grad-noise --defaults --output DIR      asks nothing
"""

_LICENSES = ("MIT", "BSD-3-Clause")


def add_to(commands: Subparsers) -> None:
    """Add the command to the words of ``nvalchemi hooks``."""
    parser = add_command(
        commands,
        "new",
        help="write the distribution of a hook of your own",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("name", help="what the hook does, in lower-case words with hyphens: grad-noise")
    parser.add_argument("--output", type=Path, metavar="DIR", help="the folder to write; by default NAME, here")
    parser.add_argument("--defaults", action="store_true", help="ask nothing")
    parser.add_argument("--summary", help="one line on what the hook does")
    parser.add_argument("--author", help="whose name stands in the metadata and in the licence")
    parser.add_argument("--license", choices=_LICENSES, help=f"by default {_LICENSES[0]}")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Ask what was not given, and write."""
    from nvalchemi.cli.new.names import checked_names
    from nvalchemi.cli.new.render import refuse_occupied, rendered, write_all

    names = checked_names(options.name)
    folder: Path = options.output or Path(names.distribution)
    refuse_occupied(folder)  # before anybody is asked anything
    summary, author, license = _answers(options, f"{names.cls} for nvalchemi-hooks")
    values = {
        "author": author,
        "class_name": names.cls,
        "core_range": _core_range(),
        "distribution": names.distribution,
        "license": license,
        "package": names.package,
        "summary": summary,
    }
    files = rendered(values)
    write_all(files, folder)
    print(f"{len(files)} files written to {folder}. Next:\n")
    print(f"  cd {folder}\n  pip install -e '.[test]'\n  pytest\n")
    print(f"The hook is in src/{names.package}/hook.py; strategies name it {names.package!r}.")
    return 0


def _answers(options: argparse.Namespace, summary: str) -> tuple[str, str, str]:
    """Return summary, author and licence: as given, as answered, or as they are by default."""
    import getpass

    asks = not options.defaults
    if asks and not sys.stdin.isatty():
        raise ValueError("there is nobody to ask, as standard input is no terminal; add --defaults")
    try:
        author = getpass.getuser()
    except (KeyError, OSError):  # no name in the environment, and none for this user id
        author = "the author"
    answers = {"summary": summary, "author": author, "license": _LICENSES[0]}
    for name, default in answers.items():
        given = getattr(options, name)
        answers[name] = _one_line(name, given or (asks and input(f"{name} [{default}]: ").strip()) or default)
    if answers["license"] not in _LICENSES:
        raise ValueError(f"the licence is {answers['license']!r}; the template has {' and '.join(_LICENSES)}")
    return answers["summary"], answers["author"], answers["license"]


def _one_line(name: str, text: str) -> str:
    """Refuse what would break the files it is written to."""
    if not text.isprintable() or any(mark in text for mark in '"\\'):
        raise ValueError(f"the {name} is {text!r}; give one line without quotation marks and backslashes")
    return text


def _core_range() -> str:
    """Return the versions of the core that a hook written today is for: up to the next that may change the hook API."""
    from nvalchemi.metadata import CORE_DISTRIBUTION, UNKNOWN_VERSION, core_version

    if core_version() == UNKNOWN_VERSION:
        raise LookupError(f"{CORE_DISTRIBUTION} is not installed, so its version is not known; install it with pip")
    parts = core_version().split("+")[0].split(".")
    major, minor = int(parts[0]), int(parts[1]) if len(parts) > 1 else 0
    return f">={major}.{minor},<{major + 1}" if major else f">=0.{minor},<0.{minor + 1}"
