"""What the commands share in reading the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_command", "add_group", "version_action"]


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


def add_command(
    commands: Subparsers, name: str, *, help: str, description: str, epilog: str
) -> argparse.ArgumentParser:
    """Add a command whose description and epilog are printed as they are written."""
    return commands.add_parser(
        name,
        help=help,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from nvalchemi.hooks.plugins.specs import HOOK_API_VERSION
        from nvalchemi.metadata import CORE_DISTRIBUTION, core_version

        print(f"{CORE_DISTRIBUTION} {core_version()} (hook API {HOOK_API_VERSION})")
        parser.exit()
