"""What was measured, beside what should be reached: as a table, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from rows.targets import TARGETS

__all__ = ["Figure", "as_table", "missed", "write_json"]


@dataclass(frozen=True)
class Figure:
    """One measured row.

    Parameters
    ----------
    key : str
        Which target of `TARGETS` it stands beside.
    value : float, optional
        None: it was not measured, and `note` says why.
    spread : tuple of float, optional
        The quartiles that go with a median.
    peers : mapping of str to float or None
        The same of others, measured in the same run; None where one is not installed.
    note : str
        What the reader should know.
    broken : str
        A condition of the row, other than its number, that does not hold; empty if all do.
    """

    key: str
    value: float | None
    spread: tuple[float, float] | None = None
    peers: Mapping[str, float | None] = field(default_factory=dict)
    note: str = ""
    broken: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether the target is reached; None if that was not measured."""
        return None if self.value is None else self.value <= TARGETS[self.key].at_most and not self.broken

    def as_json(self) -> dict[str, Any]:
        """Return the row as plain data."""
        target = TARGETS[self.key]
        return {
            "row": f"{target.row}{target.unit and ', '}{target.unit}",
            "value": None if self.value is None else round(self.value, 4),
            "target": target.at_most,
            "holds": self.holds,
            "peer": {name: "not installed" if v is None else round(v, 4) for name, v in self.peers.items()},
        }


def write_json(figures: Iterable[Figure], path: Path) -> None:
    """Write a list of ``{"row", "value", "target", "holds", "peer"}``."""
    path.write_text(json.dumps([figure.as_json() for figure in figures], indent=1, ensure_ascii=False) + "\n")


def missed(figures: Iterable[Figure]) -> list[Figure]:
    """Return the rows that do not hold."""
    return [figure for figure in figures if figure.holds is False]


def as_table(figures: Iterable[Figure]) -> Table:
    """Return the table: target (stretch), today's figure with its quartiles, verdict, peers."""
    table = Table(box=SIMPLE, header_style="bold", pad_edge=False)
    table.add_column("row", ratio=5)
    table.add_column("at most", justify="right")
    table.add_column("today", justify="right")
    table.add_column("")
    table.add_column("others in this run", ratio=4)
    for figure in figures:
        verdict = {True: "holds", False: "[bold red]misses[/]", None: ""}[figure.holds]
        others = [f"{name} {'not installed' if v is None else _short(v)}" for name, v in figure.peers.items()]
        said = "; ".join(filter(None, [", ".join(others), figure.note, figure.broken]))
        table.add_row(TARGETS[figure.key].row, str(TARGETS[figure.key]), _today(figure), verdict, said)
    return table


def _today(figure: Figure) -> str:
    if figure.value is None:
        return "not measured"
    spread = "" if figure.spread is None else f" ({_short(figure.spread[0])} to {_short(figure.spread[1])})"
    return f"{_short(figure.value)}{spread}"


def _short(number: float) -> str:
    return f"{number:.3f}" if 0 < number < 0.1 else f"{number:.2f}".rstrip("0").rstrip(".")
