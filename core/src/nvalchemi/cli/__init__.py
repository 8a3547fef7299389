"""The command line: one file a command, none of which imports torch to say something about metadata."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; see ``nvalchemi --help``.

    Parameters
    ----------
    arguments : sequence of str, optional
        By default those of the process.

    Returns
    -------
    int
        The exit code.
    """
    from nvalchemi.cli.app import main as run  # argparse and the commands are loaded when a command runs

    return run(arguments)
