"""Which checkpoints are kept: the last k and the best, as names in one folder."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

__all__ = ["Retention", "best_of", "checked_state", "checkpoint_name", "step_of"]

_STATE = ("folder", "kept", "values", "metric", "mode")
_NAME = re.compile(r"step-(\d{8,})")


def checkpoint_name(step: int) -> str:
    """Return the name of the folder of a step.

    >>> checkpoint_name(30)
    'step-00000030'
    """
    return f"step-{step:08}"


def step_of(name: str) -> int | None:
    """Return the step of a folder's name, or None if it is not that of a checkpoint.

    >>> step_of("step-00000030"), step_of("step-30")
    (30, None)
    """
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def best_of(names: Sequence[str], values: Collection[str]) -> str | None:
    """Return the best of some names in the order of saving: the last with a value, as each is better than the before.

    >>> best_of(["step-00000010", "step-00000020", "step-00000030"], {"step-00000010": 0.5, "step-00000020": 0.4})
    'step-00000020'
    """
    return next((name for name in reversed(names) if name in values), None)


class Retention:
    """The record of one folder of checkpoints. It touches no checkpoint; it says what is in use and what is not.

    Parameters
    ----------
    keep : int, optional
        How many of the last are kept; None for all.
    metric : str, optional
        By which the best is found.
    mode : {"min", "max"}
        Whether a low or a high value is good.

    Attributes
    ----------
    folder : str, optional
        The mark of the folder that this is the record of, which its index bears too: by it a run knows its folder
        again, wherever that was moved to.
    names : list of str
        The checkpoints in the order of saving, with those that are still to be written.
    values : dict of str to float
        The metric of those that were the best when they were saved.
    unwritten : set of str
        Those still to be written, or to fail.

    Examples
    --------
    >>> record = Retention(keep=1, metric="loss", mode="min")
    >>> for step, value in (10, 0.5), (20, None), (30, None):
    ...     record.written(record.add(step, best_value=value))
    >>> record.surplus(), record.best
    (['step-00000020'], 'step-00000010')
    """

    def __init__(self, *, keep: int | None, metric: str | None, mode: str) -> None:
        self._keep, self._metric, self._mode = keep, metric, mode
        self.begin(None)

    def begin(self, folder: str | None) -> None:
        """Begin the record of a folder that holds nothing yet."""
        self.folder = folder
        self.names: list[str] = []
        self.values: dict[str, float] = {}
        self.unwritten: set[str] = set()

    @property
    def best(self) -> str | None:
        """The best, written or not."""
        return best_of(self.names, self.values)

    def holds(self, step: int) -> bool:
        """Return whether the last save was that of `step`."""
        return self.names[-1:] == [checkpoint_name(step)]

    def improves(self, value: float) -> bool:
        """Return whether a value of the metric is better than the best so far; nan never is."""
        return self._beats(value, self.best)

    def is_sure(self, value: float) -> bool:
        """Return whether `improves` says the same whatever becomes of those still to be written."""
        return self._beats(value, self.best) == self._beats(value, best_of(self._written(), self.values))

    def add(self, step: int, *, best_value: float | None = None) -> str:
        """Put a step down as the last one, with its value if it is the best, and return its name."""
        name = checkpoint_name(step)
        self.forget(name)  # of a run that was given up for this one
        self.names.append(name)
        self.unwritten.add(name)
        if best_value is not None:
            self.values[name] = best_value
        return name

    def mark(self, value: float) -> None:
        """Put the last one down as the best."""
        self.values[self.names[-1]] = value

    def written(self, name: str) -> None:
        """Put one down as complete."""
        self.unwritten.discard(name)

    def surplus(self) -> list[str]:
        """Return what is complete, and neither among the last that are nor the best of them."""
        written = self._written()
        recent = written if self._keep is None else written[-self._keep :]
        best = best_of(written, self.values)
        return [name for name in written if name not in recent and name != best]

    def forget(self, name: str) -> None:
        """Forget one that could not be written, or was removed."""
        if name in self.names:
            self.names.remove(name)
        self.values.pop(name, None)
        self.unwritten.discard(name)

    def state(self) -> dict[str, Any]:
        """Return the record as plain data."""
        names = {"folder": self.folder, "kept": list(self.names), "values": dict(self.values)}
        return {**names, "metric": self._metric, "mode": self._mode}

    def load(self, state: Mapping[str, Any], *, index: Mapping[str, Any], complete: Sequence[str]) -> None:
        """Take over a record, as far as it is that of this folder.

        What was written there after it, by a run that was given up for this one, is taken over too, as the oldest. A
        best by another metric is no longer the best. Of another folder nothing is taken over.

        Parameters
        ----------
        state : mapping
            What `state` returned.
        index : mapping
            What the index in the folder says; empty if there is none.
        complete : sequence of str
            The complete checkpoints in the folder.

        Raises
        ------
        ValueError
            It is not what `state` returns; nothing is changed.
        """
        kept = checked_state(state)
        if state["folder"] is None or state["folder"] != index.get("folder"):
            self.begin(None)
            return
        self.begin(state["folder"])
        self.names = [name for name in complete if name not in kept] + [name for name in kept if name in complete]
        if (state["metric"], state["mode"]) == (self._metric, self._mode):
            self.values = {name: value for name, value in state["values"].items() if name in self.names}

    def _written(self) -> list[str]:
        return [name for name in self.names if name not in self.unwritten]

    def _beats(self, value: float, best: str | None) -> bool:
        if best is None:
            return not math.isnan(value)
        return value < self.values[best] if self._mode == "min" else value > self.values[best]


def checked_state(state: Any) -> list[str]:
    """Return the names in a record, once it is certain to be one.

    Raises
    ------
    ValueError
        It is not what `Retention.state` returns.
    """
    expected = f"give what CheckpointHook.state_dict() returned: {', '.join(_STATE)}"
    if not isinstance(state, Mapping) or set(state) != set(_STATE):
        raise ValueError(f"CheckpointHook: the state is {state!r}; {expected}.")
    folder, kept, values = state["folder"], state["kept"], state["values"]
    fits = (folder is None or isinstance(folder, str)) and isinstance(kept, list) and isinstance(values, Mapping)
    if (
        not fits
        or not all(isinstance(name, str) and step_of(name) is not None for name in kept)
        or not all(name in kept and isinstance(value, float) for name, value in values.items())
    ):
        raise ValueError(
            f"CheckpointHook: in the state folder is {folder!r}, kept {kept!r} and values {values!r}; {expected}."
        )
    return list(kept)
