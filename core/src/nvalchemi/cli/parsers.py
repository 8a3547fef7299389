"""What the commands share in reading the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_group", "print_columns", "printable", "version_action"]


def add_group(parser: argparse.ArgumentParser, title: str) -> Subparsers:
    """Give a parser a further word; without it, its help is shown."""

    def show_help(options: argparse.Namespace) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(run=show_help)
    return parser.add_subparsers(title=f"{title}s", metavar="COMMAND")


def version_action() -> type[argparse.Action]:
    """Return the action of ``--version``, which reads the metadata only when it is asked to."""
    return _Version


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns, as wide as they need to be: for a pipe, a file, or a reader without colours."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def printable(text: object) -> str:
    """Return a text that comes from elsewhere with everything escaped that a terminal would act upon."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in str(text))


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from nvalchemi.hooks.plugins.specs import HOOK_API_VERSION
        from nvalchemi.metadata import CORE_DISTRIBUTION, core_version

        print(f"{CORE_DISTRIBUTION} {core_version()} (hook API {HOOK_API_VERSION})")
        parser.exit()
