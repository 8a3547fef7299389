"""The table of known faults, out of the tests themselves; run it to write it into the page.

It reads sources and imports nothing, so it is the same in every environment.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "explanation" / "known-faults.md"
FAMILIES = ["ema", "skipped_steps", "clipping", "scaling", "accumulation", "plugins"]


@dataclass(frozen=True)
class Law:
    """A test: what holds, and the naive way that it has to catch, if it is there for one."""

    test: str
    family: str
    holds: str
    naive: str | None
    shows: str

    @property
    def entry(self) -> int:
        """The number of the fault."""
        return int(re.match(r"test_a(\d\d)_", self.test)[1])


def laws() -> list[Law]:
    """Return all tests of known faults, in order."""
    return [law for family in FAMILIES for law in sorted(_laws_of(family), key=lambda law: law.entry)]


def mistakes() -> dict[str, str]:
    """Return the naive ways by name, with what goes wrong in them."""
    found = {}
    for file in sorted((FOLDER / "naive").glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        public = next((_value(n.value) for n in tree.body if isinstance(n, ast.Assign) and _is_all(n)), [])
        classes = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in public)
        found.update({node.name: _first_sentence(node) for node in classes})
    return {name: text for name, text in found.items() if name not in ("Average", "Loop")}


def rows(family: str) -> str:
    """Return the part of the page on one family."""
    wrong, lines = mistakes(), ["```{list-table}", ":header-rows: 1", ":widths: 4 32 32 32", ""]
    lines += _row("", "what goes wrong", "what holds here", "the test, and what it shows of the wrong way")
    own = [law for law in laws() if law.family == family]
    for law in own:
        if law.naive:
            lines += _row(str(law.entry), wrong[law.naive], law.holds, f"`{law.test}`: `{law.shows}`")
    lines += ["```", ""]
    if beside := [law for law in own if not law.naive]:
        lines += ["Beside them:", ""]
        for law in beside:
            text = f"* {law.entry}: {law.holds} `{law.test}`"
            lines += textwrap.wrap(text, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join([*lines, ""])


def written(page: str) -> str:
    """Return the page with its tables as they should be."""
    for family in FAMILIES:
        begin, end = f"<!-- begin {family} -->\n", f"<!-- end {family} -->"
        page = re.sub(f"{begin}.*?{end}", lambda _, f=family, b=begin, e=end: f"{b}\n{rows(f)}\n{e}", page, flags=re.S)
    return page


def _row(*cells: str) -> list[str]:
    lines = []
    for place, cell in enumerate(cells):
        mark = "* - " if place == 0 else "  - "
        lines += textwrap.wrap(cell, 112, initial_indent=mark, subsequent_indent="    ", break_long_words=False) or [
            mark.rstrip()
        ]
    return lines


def _laws_of(family: str) -> Iterator[Law]:
    tree = ast.parse((FOLDER / f"test_{family}.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            fault = next((_arguments(one) for one in node.decorator_list if "mark.fault" in ast.unparse(one)), {})
            yield Law(node.name, family, _first_sentence(node), fault.get("naive"), str(fault.get("shows", "")))


def _arguments(decorator: ast.expr) -> dict[str, Any]:
    assert isinstance(decorator, ast.Call)
    return {str(one.arg): _value(one.value) for one in decorator.keywords}


def _first_sentence(node: ast.ClassDef | ast.FunctionDef) -> str:
    return (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ")


def _is_all(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:  # a name, of an exception for example
        return ast.unparse(node)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
