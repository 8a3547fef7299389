"""The switches in the environment: what may not be loaded, and how strict to be."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from nvalchemi.hooks.plugins.suggest import did_you_mean
from nvalchemi.metadata import canonical_name

__all__ = ["ALLOW", "DISABLE", "STRICT", "TRACE", "Switches", "is_first_rank", "is_on", "qualified"]

DISABLE = "NVALCHEMI_HOOKS_DISABLE"
ALLOW = "NVALCHEMI_HOOKS_ALLOW"
STRICT = "NVALCHEMI_HOOKS_STRICT"
TRACE = "NVALCHEMI_HOOKS_TRACE"
_EVERYTHING = "*"
_NO = frozenset({"", "0", "false", "no", "off"})


def is_first_rank() -> bool:
    """Whether this process is the one among several that speaks for all, as ``torchrun`` tells it."""
    return "WORLD_SIZE" not in os.environ or os.environ.get("RANK", "0") == "0"


@dataclass(frozen=True, slots=True)
class Switches:
    """The switches as they stand in the environment now.

    Attributes
    ----------
    disabled : frozenset of str
        Hook names, ``distribution:name`` or ``*``: never loaded.
    allowed : frozenset of str or None
        When it is given, nothing else is loaded.
    strict : bool
        Whether every failure is an error.
    """

    disabled: frozenset[str] = frozenset()
    allowed: frozenset[str] | None = None
    strict: bool = False

    @classmethod
    def from_environment(cls) -> Switches:
        """Read the environment variables; an empty one counts as unset."""
        disabled = _names(os.environ.get(DISABLE, ""))
        allowed = _names(os.environ.get(ALLOW, ""))
        return cls(disabled, allowed or None, is_on(STRICT))

    def is_disabled(self, name: str, distribution: str) -> bool:
        """Whether a hook is switched off by name."""
        return not self.disabled.isdisjoint((_EVERYTHING, name, qualified(distribution, name)))

    def is_allowed(self, name: str, distribution: str) -> bool:
        """Whether the allow-list, where there is one, holds the hook."""
        return self.allowed is None or not self.allowed.isdisjoint((_EVERYTHING, name, qualified(distribution, name)))

    def unknown_names(self, known: Iterable[str]) -> list[str]:
        """Return one sentence for each name in a switch that is not among the known ones."""
        known = {_EVERYTHING, *known}
        return [
            f"{variable} names {name!r}, and no such hook is installed{did_you_mean(name, known)}"
            for variable, names in ((DISABLE, self.disabled), (ALLOW, self.allowed or ()))
            for name in sorted(set(names) - known)
        ]


def is_on(variable: str) -> bool:
    """Whether an environment variable is set to anything but "no"."""
    return os.environ.get(variable, "").strip().lower() not in _NO


def qualified(distribution: str, name: str) -> str:
    """Return the name by which a hook of one distribution is chosen.

    >>> qualified("Acme_Hooks", "grad_noise")
    'acme-hooks:grad_noise'
    """
    return f"{canonical_name(distribution)}:{name}"


def _names(value: str) -> frozenset[str]:
    return frozenset(_normalise(name.strip()) for name in value.split(",") if name.strip())


def _normalise(name: str) -> str:
    distribution, colon, hook = name.rpartition(":")
    return qualified(distribution.strip(), hook.strip()) if colon else name
