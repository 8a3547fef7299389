"""The directive ``stage-diagram``: the training loop, drawn from the docstring of `TrainingStage` at every build."""

from __future__ import annotations

import inspect
import re
from html import escape
from typing import Any, ClassVar, NamedTuple

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

from nvalchemi.training import TrainingStage

WIDTH, LINE, INDENT, NOTES_AT = 860, 28, 22, 330
REFERENCE = "reference/training"  # the page that describes the stages


class Row(NamedTuple):
    """One line of the loop."""

    level: int
    text: str
    note: str

    @property
    def is_stage(self) -> bool:
        """Whether hooks are called here."""
        return self.text in TrainingStage.__members__


class StageDiagram(SphinxDirective):
    """The loop as SVG, each stage a link to its description."""

    has_content: ClassVar[bool] = False

    def run(self) -> list[nodes.Node]:
        """Return the picture; Sphinx puts it on the page."""
        self.env.note_dependency(inspect.getfile(TrainingStage))
        link = self.env.app.builder.get_relative_uri(self.env.docname, REFERENCE)
        return [nodes.raw("", drawn(rows(), f"{link}#nvalchemi.training.TrainingStage."), format="html")]


def rows() -> list[Row]:
    """Read the loop from the docstring.

    Raises
    ------
    ExtensionError
        A stage is not in it, or more than once: the picture would be wrong.
    """
    literal = inspect.cleandoc(TrainingStage.__doc__ or "").partition("::\n")[2]
    lines = re.findall(r"^ {4}( *)(.+?)(?: +# (.*))?$", literal.partition("\nTwo stages")[0], re.MULTILINE)
    found = [Row(len(indent) // 4, text, note) for indent, text, note in lines]
    drawn_stages = sorted(row.text for row in found if row.is_stage)
    if drawn_stages != sorted(TrainingStage.__members__):
        raise ExtensionError(f"The docstring of TrainingStage draws {drawn_stages}; every stage belongs in it, once.")
    return found


def drawn(loop: list[Row], link: str) -> str:
    """Return the rows as SVG, in the colours of the page around it."""
    height = LINE * len(loop) + 8
    parts = [
        f'<svg class="stage-diagram" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="The stages of training" '
        'font-size="13" font-family="var(--font-stack)" fill="currentColor" style="max-width: 100%">'
    ]
    for place, row in enumerate(loop):
        x, y = 4 + INDENT * row.level, LINE * place + 4
        if row.text.startswith("for each"):
            inner = next((n for n, other in enumerate(loop[place + 1 :]) if other.level <= row.level), len(loop))
            parts.append(
                _box(x - 2, y, WIDTH - x - 2 * row.level - 4, LINE * (inner + 1) - row.level, "none", dash="4 3")
            )
        parts += _stage(row, x, y, link) if row.is_stage else [_text(x + 6, y, row.text, "font-style='italic'")]
        parts.append(_text(NOTES_AT, y, row.note, "opacity='0.75'"))
    return "\n".join([*parts, "</svg>"])


def _stage(row: Row, x: int, y: int, link: str) -> list[str]:
    fill = "var(--color-brand-content)" if row.note.startswith("slot") else "none"
    name = _text(x + 8, y, row.text, "font-family='var(--font-stack--monospace)'")
    return [f'<a href="{link}{row.text}">', _box(x, y + 3, 8 * len(row.text) + 16, LINE - 7, fill), name, "</a>"]


def _box(x: int, y: int, width: int, height: int, fill: str, dash: str = "") -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{fill}" fill-opacity="0.25" '
        f'stroke="currentColor" stroke-opacity="0.4" stroke-dasharray="{dash}"/>'
    )


def _text(x: int, y: int, text: str, style: str) -> str:
    return f'<text x="{x}" y="{y + 18}" {style}>{escape(text)}</text>' if text else ""


def setup(app: Sphinx) -> dict[str, Any]:
    """Make the directive known to Sphinx."""
    app.add_directive("stage-diagram", StageDiagram)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
