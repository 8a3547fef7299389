"""The implementation that is shipped, in the words of these tests: nothing but public doors."""

from .discovery import Discovery
from .ranks import Accumulated, Sharded
from .run import Run

__all__ = ["Accumulated", "Discovery", "Run", "Sharded"]
