"""Data that is made anew for whoever asks, so that memory holds no more of it than is in use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["OnDemand"]


class OnDemand(Mapping[str, Any]):
    """A mapping that may make its values whenever they are asked for; they belong to who asked, who need not copy them.

    Parameters
    ----------
    values : mapping of str to Any
        A value that can be called is called whenever it is asked for.

    Examples
    --------
    >>> state = OnDemand({"step": 3, "moments": lambda: [0.0, 0.0]})
    >>> state["step"], state["moments"], state["moments"] is state["moments"]
    (3, [0.0, 0.0], False)
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        return value() if callable(value) else value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
