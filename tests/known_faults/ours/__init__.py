"""The implementation that is shipped, in the words of these tests: nothing but public doors."""

from .run import Run

__all__ = ["Run"]
