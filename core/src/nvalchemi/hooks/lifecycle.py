"""Open in order, close in reverse, lose nothing on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

__all__ = ["HookLifecycle", "close_all"]


def close_all(closers: Iterable[tuple[str, Callable[[], Any]]], error: BaseException | None = None) -> None:
    """Call every closer, also after one of them has raised.

    Parameters
    ----------
    closers : iterable of (str, callable)
        What is closed, in words, and the call that closes it.
    error : BaseException, optional
        An exception that is already under way. It stays the one that is raised; failures of closers become notes on it.

    Raises
    ------
    BaseException
        The first failure of a closer, with the later ones as notes, if no `error` was under way.

    Examples
    --------
    >>> close_all([("a file", lambda: print("closed"))])
    closed
    """
    first: BaseException | None = None
    for what, close in closers:
        try:
            close()
        except BaseException as failure:  # whatever it is, the others must still be closed; it is raised or noted below
            if error is None and first is None:
                first = failure
            else:
                (error or first).add_note(f"Closing {what} failed as well: {failure!r}")  # type: ignore[union-attr]
    if first is not None:
        raise first


class HookLifecycle:
    """Enter, exit and close a group of hooks as one.

    A hook takes part with what it has: ``__enter__`` and ``__exit__``, ``close``, both or neither. Closing twice is
    harmless: what is closed is forgotten.

    Parameters
    ----------
    members : callable
        Returns the hooks of the group, in order; asked at every entering and closing, so that the group may grow.
    """

    def __init__(self, members: Callable[[], Iterable[object]]) -> None:
        self._members = members
        self._entered: list[Any] = []
        self._closed: set[int] = set()

    def enter(self) -> None:
        """Enter every hook that has ``__enter__``; if one fails, exit those already entered and raise its error."""
        self._closed.clear()
        for hook in self._members():
            if not (hasattr(hook, "__enter__") and hasattr(hook, "__exit__")):
                continue
            try:
                hook.__enter__()
            except BaseException as error:  # raised again once the hooks entered before it are closed
                self.close(error)
                raise
            self._entered.append(hook)

    def close(self, error: BaseException | None = None, traceback: TracebackType | None = None) -> None:
        """Close every hook in reverse order: by ``__exit__`` if it was entered, by ``close`` if that is what it has."""
        pending = [hook for hook in reversed(list(self._members())) if id(hook) not in self._closed]
        entered, self._entered = self._entered, []
        self._closed.update(id(hook) for hook in pending)
        close_all(((_describe(hook), _closer(hook, entered, error, traceback)) for hook in pending), error)


def _describe(hook: object) -> str:
    return f"hook {type(hook).__name__}"


def _closer(
    hook: Any, entered: list[Any], error: BaseException | None, traceback: TracebackType | None
) -> Callable[[], Any]:
    if any(hook is other for other in entered):
        return lambda: hook.__exit__(type(error) if error else None, error, traceback)
    return getattr(hook, "close", lambda: None)
