"""The command line: one file a command, none of which imports torch to say something about metadata."""

from nvalchemi.cli.app import main

__all__ = ["main"]
