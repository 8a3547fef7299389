"""Training hooks that compose: the core of the ``nvalchemi-hooks`` distributions.

Nothing is imported here. The public doors are :mod:`nvalchemi.hooks`, :mod:`nvalchemi.training` and
:mod:`nvalchemi.training.hooks`.

>>> import nvalchemi
>>> isinstance(nvalchemi.__version__, str)
True
"""

from __future__ import annotations

__all__ = ["__version__"]


def __getattr__(name: str) -> str:
    """Read ``__version__`` from the installed metadata when it is asked for."""
    if name == "__version__":
        from nvalchemi.metadata import core_version

        return core_version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
