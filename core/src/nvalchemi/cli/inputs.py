"""What the commands are given: files, JSON, TOML; each with a message that says which of them is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["keyword_arguments", "parsed_json", "parsed_toml", "read_text"]


def read_text(path: Path) -> str:
    """Return a file's text."""
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise FileNotFoundError(f"there is no file {path}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from error


def parsed_json(text: str, where: str) -> Any:
    """Return the value of a JSON text."""
    import json

    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}") from error


def parsed_toml(text: str, where: str) -> dict[str, Any]:
    """Return the table of a TOML text."""
    import tomllib

    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is no TOML: {error}") from error


def keyword_arguments(text: str) -> dict[str, Any]:
    """Return the value of ``--arguments``."""
    arguments = parsed_json(text, "--arguments")
    if not isinstance(arguments, dict):
        raise ValueError(f"--arguments is {text}; give a JSON object, '{{\"decay\": 0.99}}' for example")
    return arguments
