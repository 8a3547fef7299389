"""What the commands share in printing: columns, JSON, colours, warnings."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence

__all__ = ["coloured", "print_columns", "print_json", "printable", "warnings_told"]

_COLOURS = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33}


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns, as wide as they need to be: for a pipe, a file, or a reader without colours."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def printable(text: object) -> str:
    """Return a text that comes from elsewhere with everything escaped that a terminal would act upon."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in str(text))


def print_json(value: object) -> None:
    """Print JSON for a program; what JSON has no word for is written as Python shows it."""
    import json

    print(json.dumps(value, indent=2, default=repr))


def coloured(text: str, colour: str) -> str:
    """Return text in a colour, if standard output is a terminal and ``NO_COLOR`` is not set."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


@contextlib.contextmanager
def warnings_told() -> Iterator[None]:
    """Print the warnings of a block on standard error, a line each, so that what is on standard output stays clean."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            for warning in caught:
                print("nvalchemi: warning:", warning.message, file=sys.stderr)
