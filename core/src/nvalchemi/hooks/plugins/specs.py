"""The contract of a plugin: one function that says which hooks it offers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nvalchemi.hooks.plugins.markers import hookspec

__all__ = ["HOOK_API_VERSION", "RESERVED_NAMES", "HookOffer", "nvalchemi_hooks"]

HOOK_API_VERSION = 1
"""The number of this contract; it grows when a plugin written for the one before has to change."""

RESERVED_NAMES = frozenset({"auto", "*"})


@dataclass(frozen=True, slots=True)
class HookOffer:
    """A hook that a plugin offers under a name.

    Parameters
    ----------
    name : str
        The name of the entry point, and what a configuration writes: letters, digits, ``_``, ``-`` and ``.``.
    factory : callable
        Makes a new hook from keyword arguments; usually the class.
    default_kwargs : mapping, optional
        Keyword arguments with which the hook is useful to anybody, without a word of configuration. A hook that has
        them joins ``hooks="auto"``; a configuration's own arguments override them one by one.
    summary : str
        One line on what the hook does.

    Raises
    ------
    TypeError
        `factory` cannot be called, or `default_kwargs` is no mapping from names.
    ValueError
        `name` is empty, reserved, or has other characters than the above.

    Examples
    --------
    >>> offer = HookOffer("grad_noise", factory=dict, default_kwargs={"eta": 0.01}, summary="adds noise to gradients")
    >>> offer.factory(**offer.default_kwargs)
    {'eta': 0.01}
    """

    name: str
    factory: Callable[..., object]
    default_kwargs: Mapping[str, Any] | None = None
    summary: str = ""

    def __post_init__(self) -> None:
        if not _is_name(self.name):
            raise ValueError(
                f"HookOffer: name is {self.name!r}; use letters, digits, '_', '-' and '.', and none of "
                f"{', '.join(sorted(RESERVED_NAMES))}"
            )
        if not callable(self.factory):
            raise TypeError(
                f"HookOffer {self.name!r}: factory is a {type(self.factory).__name__}, which cannot be called; "
                "give the hook's class or a function that returns a new hook"
            )
        if self.default_kwargs is not None:
            if not _are_kwargs(self.default_kwargs):
                raise TypeError(
                    f"HookOffer {self.name!r}: default_kwargs is {self.default_kwargs!r}; "
                    "give a mapping from names of keyword arguments to values, or None"
                )
            object.__setattr__(self, "default_kwargs", dict(self.default_kwargs))


@hookspec
def nvalchemi_hooks() -> Iterable[HookOffer]:  # type: ignore[empty-body]  # a specification has no body
    """Return the hooks that this plugin offers, one `HookOffer` for each of its entry points.

    It is called once, when one of the hooks is used for the first time. Import what is heavy inside the factory.

    Examples
    --------
    In ``acme_hooks/plugin.py``, with ``grad_noise = "acme_hooks.plugin"`` in the table
    ``[project.entry-points."nvalchemi.hooks"]`` of ``pyproject.toml``:

    >>> from nvalchemi.hooks import HookOffer, hookimpl
    >>> @hookimpl
    ... def nvalchemi_hooks():
    ...     return [HookOffer("grad_noise", factory=dict)]
    """


def _is_name(value: object) -> bool:
    return (
        isinstance(value, str) and value not in RESERVED_NAMES and re.fullmatch(r"[A-Za-z0-9_.-]+", value) is not None
    )


def _are_kwargs(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
