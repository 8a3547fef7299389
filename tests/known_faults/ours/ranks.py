"""What runs on two ranks."""

from __future__ import annotations

__all__ = ["Accumulated", "Sharded"]


class Accumulated:
    """Windows of four batches over two ranks."""

    job = "accumulated"


class Sharded:
    """The average of a sharded model."""

    job = "sharded"
