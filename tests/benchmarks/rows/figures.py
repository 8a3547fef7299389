"""What was measured, beside what should be reached: as a table, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from rows.targets import Target

__all__ = ["Figure", "as_table", "missed", "write_json"]


@dataclass(frozen=True)
class Figure:
    """One measured row.

    Parameters
    ----------
    target : Target
        What it stands beside.
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

    target: Target
    value: float | None
    spread: tuple[float, float] | None = None
    peers: Mapping[str, float | None] = field(default_factory=dict)
    note: str = ""
    broken: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether the target is reached; None if there is none, or nothing was measured."""
        if self.value is None or self.target.at_most is None:
            return None
        return self.value <= self.target.at_most and not self.broken

    def as_json(self) -> dict[str, Any]:
        """Return the row as plain data."""
        target = self.target
        return {
            "row": f"{target.row}{target.unit and ', '}{target.unit}",
            "value": None if self.value is None else _rounded(self.value),
            "target": target.at_most,
            "holds": self.holds,
            "peer": {name: "not installed" if v is None else _rounded(v) for name, v in self.peers.items()},
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
        table.add_row(figure.target.row, str(figure.target), _today(figure), verdict, said)
    return table


def _today(figure: Figure) -> str:
    if figure.value is None:
        return "not measured"
    spread = "" if figure.spread is None else f" ({_short(figure.spread[0])} to {_short(figure.spread[1])})"
    return f"{_short(figure.value)}{spread}"


def _short(number: float) -> str:
    if 0 < number < 0.1:
        return f"{number:.3f}" if number >= 0.001 else f"{number:.0e}"
    return f"{number:.2f}".rstrip("0").rstrip(".")


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")
