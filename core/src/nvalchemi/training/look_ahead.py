"""The batches of a pass, fetched one ahead where somebody wants to know which is the last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from nvalchemi.training.position import DataPosition

__all__ = ["Batches"]

_UNKNOWN, _END = object(), object()


class Batches:
    """The batches of one pass, each given once and not kept.

    A batch that is fetched ahead costs its memory. It may draw random numbers when it is fetched, so the place before
    that is what the position keeps: whoever goes on from there fetches the very same batch.

    Parameters
    ----------
    source : iterator
        Where batches come from.
    position : DataPosition
        Is told the place before a batch that waits, or None.
    looks_ahead : bool
        Fetch the next batch before one is given.

    Attributes
    ----------
    is_last : bool
        No other batch follows the one that was given; False where nobody looks ahead.
    """

    is_last = False

    def __init__(self, source: Iterator[Any], position: DataPosition, *, looks_ahead: bool) -> None:
        self._source, self._position, self._looks_ahead = source, position, looks_ahead
        self._following: Any = _UNKNOWN

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        batch, self._following = self._following, _UNKNOWN
        if batch is _UNKNOWN:
            batch = next(self._source, _END)
        if batch is _END:
            self._following = _END
            raise StopIteration
        if self._looks_ahead:
            self.fetch()
            self.is_last = self._following is _END
        else:
            self._position.ahead = None
        return batch

    def fetch(self) -> None:
        """Fetch the next batch and let it wait; if that fails, the position stays where it was."""
        place = self._position.place()
        self._following = next(self._source, _END)
        self._position.ahead = place
