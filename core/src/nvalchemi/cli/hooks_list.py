"""``nvalchemi hooks list``: the installed hooks, from metadata alone."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from nvalchemi.cli.output import print_columns, print_json, warnings_told
from nvalchemi.cli.parsers import add_command

if TYPE_CHECKING:
    from nvalchemi.cli.parsers import Subparsers
    from nvalchemi.hooks.plugins.catalog import HookListing

__all__ = ["add_to", "run"]

_DESCRIPTION = """\
List the hooks that are installed. Only metadata is read: no plugin is imported, and none can make this fail.

Installed is not active: a hook joins a run when its configuration names it, as in
  TrainingStrategy(..., hooks=["ema", {"grad_clip": {"max_norm": 1.0}}])
"""

_EPILOG = """\
states:
  available     a configuration can name it
  disabled      NVALCHEMI_HOOKS_DISABLE names it
  not allowed   NVALCHEMI_HOOKS_ALLOW is set and does not name it
  incompatible  it was made for another version of the core
  clash         several distributions offer the name; write distribution:name to choose
  broken        it failed when it was last loaded; as nothing is loaded here, only nvalchemi.hooks.list_hooks()
                inside a running program shows it

environment:
  NVALCHEMI_HOOKS_DISABLE=a,b   never load these (* for all)
  NVALCHEMI_HOOKS_ALLOW=a,b     load only these
  NVALCHEMI_HOOKS_STRICT=1      in a run, every failure of a plugin is an error
  NVALCHEMI_HOOKS_TRACE=1       after a run, print how long each hook took at each stage

exit codes:
  0  listed, also when there is nothing to list
  2  the command line was not understood
"""

_INSTALL = """\
No hooks are installed.
  all official ones:  pip install 'nvalchemi-hooks[all]'
  one alone:          pip install 'nvalchemi-hooks[ema]'
"""

_FIELDS = ("name", "target", "distribution", "version", "api_range", "state", "reason")
_TITLES = ("NAME", "STATE", "DISTRIBUTION", "VERSION", "CORE", "TARGET", "REASON")
_ANY_VERSION = "any"


def add_to(commands: Subparsers) -> None:
    """Add the command to the words of ``nvalchemi hooks``."""
    parser = add_command(
        commands,
        "list",
        help="which hooks are installed, from which distribution, and whether they can be used",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a JSON array for a program: one object a hook, with name, target, distribution, version, "
        "api_range, state and reason",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the list; warnings go to standard error."""
    from nvalchemi.hooks.plugins.catalog import list_hooks

    with warnings_told():
        hooks = list_hooks()
    if options.json:
        print_json([{field: getattr(hook, field) for field in _FIELDS} for hook in hooks])
    elif not hooks:
        print(_INSTALL, end="")
    elif sys.stdout.isatty():
        _print_table(hooks)
    else:
        print_columns([_TITLES, *map(_cells, hooks)])
    return 0


def _cells(hook: HookListing) -> tuple[str, ...]:
    return (
        hook.name,
        str(hook.state),
        hook.distribution,
        hook.version,
        hook.api_range or _ANY_VERSION,
        hook.target,
        hook.reason,
    )


def _print_table(hooks: list[HookListing]) -> None:
    """Draw a table that fits the terminal, folding what is long, with the reasons below it as sentences."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"available": "green", "disabled": "dim", "not allowed": "dim"}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("Name", "State", "Core"):
        table.add_column(title, no_wrap=True)
    for title in ("From", "Target"):
        table.add_column(title, overflow="fold")
    for hook in hooks:
        state = Text(hook.state, style=colours.get(hook.state, "red"))
        cells = hook.name, state, hook.api_range or _ANY_VERSION, str(hook.provenance), hook.target
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in cells))
    console = Console()
    console.print(table)
    for reason in dict.fromkeys(f"{hook.name}: {hook.reason}" for hook in hooks if hook.reason):
        console.print(Text(reason), soft_wrap=True)
