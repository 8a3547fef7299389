"""From the name of a hook to those of its distribution, package, entry point and class."""

from __future__ import annotations

import keyword
import re
import sys
from dataclasses import dataclass

from nvalchemi.hooks.plugins.specs import RESERVED_NAMES
from nvalchemi.official import OFFICIAL_HOOKS

__all__ = ["Names", "checked_names"]

_FORM = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_TAKEN_PACKAGES = {
    "build",
    "conftest",
    "docs",
    "numpy",
    "pluggy",
    "pydantic",
    "pytest",
    "src",
    "test",
    "tests",
    "torch",
    "tox",
}


@dataclass(frozen=True)
class Names:
    """What a hook and its parts are called.

    Attributes
    ----------
    distribution : str
        What pip installs, ``"grad-noise"``.
    package : str
        What Python imports, ``"grad_noise"``; the entry point, which strategies name, is called the same.
    cls : str
        The class, ``"GradNoiseHook"``.
    """

    distribution: str
    package: str
    cls: str


def checked_names(name: str) -> Names:
    """Return the names that follow from a hook's name.

    Parameters
    ----------
    name : str
        Lower-case words with hyphens between them, ``"grad-noise"``.

    Raises
    ------
    ValueError
        It cannot be the name of a distribution, a package and a hook: the message says which, and what to give.

    Examples
    --------
    >>> checked_names("grad-noise")
    Names(distribution='grad-noise', package='grad_noise', cls='GradNoiseHook')
    >>> checked_names("My Hook")
    Traceback (most recent call last):
    ValueError: 'My Hook' is no name for a hook: use lower-case letters and digits, ...; 'my-hook' for example
    """
    if not _FORM.fullmatch(name):
        words = re.findall(r"[a-z][a-z0-9]*|[0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower())
        proposal = "-".join(words).lstrip("0123456789-") or "my-hook"
        raise ValueError(
            f"{name!r} is no name for a hook: use lower-case letters and digits, words with a hyphen between them, "
            f"beginning with a letter; {proposal!r} for example"
        )
    package = name.replace("-", "_")
    if reason := _why_not(package):
        raise ValueError(f"{name!r} is no name for a hook: {reason}; say what it does, 'my-{name}' for example")
    words = [word.capitalize() for word in package.split("_")]
    return Names(package.replace("_", "-"), package, "".join(words).removesuffix("Hook") + "Hook")


def _why_not(package: str) -> str:
    if keyword.iskeyword(package):
        return f"{package} is a word of the Python language"
    if package in sys.stdlib_module_names:
        return f"{package} is a module of Python's standard library"
    if package in _TAKEN_PACKAGES:
        return f"a package {package} would hide another that is needed"
    if package.partition("_")[0] == "nvalchemi":
        return "nvalchemi is what our own distributions begin with"
    if package in RESERVED_NAMES or package == "hook":
        return f"{package} means something else in a configuration of hooks"
    if package in {hook.entry_point for hook in OFFICIAL_HOOKS}:
        return f"{package} is the name of an official hook"
    return ""
