"""Settings of the hook, checked one by one: what was given, and what to give instead."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["checked_choice", "checked_count", "checked_metric", "checked_root"]


def checked_root(root: Any) -> Path:
    """Return the folder of the checkpoints, absolute, so that a change of the working directory does not matter.

    >>> checked_root("") # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: CheckpointHook: root is ''; give the path of a folder.
    """
    if not isinstance(root, str | os.PathLike) or not os.fspath(root):
        raise ValueError(f"CheckpointHook: root is {root!r}; give the path of a folder.")
    path = Path(root).expanduser().resolve()
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"CheckpointHook: root is {str(path)!r}, which is a file; give the path of a folder.")
    return path


def checked_count(name: str, value: Any) -> int | None:
    """Return an int of 1 or more, or None.

    >>> checked_count("keep", 0)
    Traceback (most recent call last):
    ValueError: CheckpointHook: keep is 0; give an int of 1 or more, or None.
    """
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"CheckpointHook: {name} is {value!r}; give an int of 1 or more, or None.")
    return None if value is None else int(value)


def checked_choice(name: str, value: Any, choices: Sequence[Any]) -> Any:
    """Return one of the choices.

    >>> checked_choice("best_mode", "least", ("min", "max"))
    Traceback (most recent call last):
    ValueError: CheckpointHook: best_mode is 'least'; give 'min' or 'max'.
    """
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(f"CheckpointHook: {name} is {value!r}; give {' or '.join(map(repr, choices))}.")
    return value


def checked_metric(best: Any) -> str | None:
    """Return the name of a metric, or None.

    >>> checked_metric(True)
    Traceback (most recent call last):
    ValueError: CheckpointHook: best is True; give the name of a validation result, "loss" for example, or None.
    """
    if best is not None and (not isinstance(best, str) or not best):
        raise ValueError(
            f'CheckpointHook: best is {best!r}; give the name of a validation result, "loss" for example, or None.'
        )
    return best
