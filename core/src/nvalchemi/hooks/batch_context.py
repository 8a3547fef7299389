"""A context manager that a hook opens for the length of a batch."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

from nvalchemi.hooks.lifecycle import close_all

__all__ = ["BatchContext"]


class BatchContext:
    """A context manager that was opened for the length of a batch, and may be closed before."""

    def __init__(self, manager: AbstractContextManager[Any], opened: list[BatchContext]) -> None:
        self._manager: AbstractContextManager[Any] | None = manager
        self._opened = opened
        self.value = manager.__enter__()
        opened.append(self)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the context, after those that were opened inside it; leaving it twice is harmless."""
        if self in self._opened:
            inner = self._opened[self._opened.index(self) :]
            del self._opened[self._opened.index(self) :]
            close_all(((repr(one), functools.partial(one._leave, error)) for one in reversed(inner)), error)

    def __repr__(self) -> str:
        return f"the batch context {type(self._manager).__name__}"

    def _leave(self, error: BaseException | None) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
