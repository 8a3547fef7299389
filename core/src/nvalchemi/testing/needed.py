"""pytest, or what to do when it is not there: it is no dependency of the core."""

from __future__ import annotations

__all__ = ["pytest"]

try:
    import pytest as pytest
except ModuleNotFoundError as error:  # only the kit and the fixtures come here
    if error.name != "pytest":
        raise
    raise ImportError(
        "The conformance kit and the fixtures of nvalchemi.testing run in pytest, which is not installed: "
        "pip install 'nvalchemi-hooks[testing]'",
        name="pytest",
    ) from error
