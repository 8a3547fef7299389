"""The closest match to a name that nobody knows."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["did_you_mean"]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question with the closest of the known names, or nothing when none is close.

    >>> did_you_mean("emma", ["ema", "grad_clip"])
    "; did you mean 'ema'?"
    >>> did_you_mean("zzz", ["ema"])
    ''
    """
    from difflib import get_close_matches  # only needed when something is wrong

    by_folded = {_fold(candidate): candidate for candidate in sorted(known)}
    close = [by_folded[match] for match in get_close_matches(_fold(name), by_folded, n=2, cutoff=0.6)]
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def _fold(name: str) -> str:
    return name.lower().replace("-", "_")
