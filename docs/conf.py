"""How the site is built: `tox -e docs`, or `sphinx-build docs build/site`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from nvalchemi.official import OFFICIAL_HOOKS

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "nvalchemi-hooks"
author = "nvalchemi-hooks contributors"
copyright = author  # noqa: A001 - what Sphinx calls it
release = (Path(__file__).parents[1] / "VERSION").read_text(encoding="utf-8").strip()

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon", "stage_diagram"]
exclude_patterns = ["_extensions", "examples/third-party-hook/CHANGELOG.md"]

# The pages are Markdown as a code host shows it: the same links work there and here.
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

# The reference comes from docstrings. What has none is left out, and tests/docs/test_site.py says so.
autodoc_default_options = {"exclude-members": "model_config, model_post_init"}  # pydantic calls these, no user does
autodoc_inherit_docstrings = False  # an error without a word of its own would show that of ValueError
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
default_role = "py:obj"  # `name` in a docstring is a link where there is something to link to
maximum_signature_line_length = 100
napoleon_google_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"{project} {release}"


def setup(app: Sphinx) -> None:
    """Describe official hooks on the pages of their plugins, not at every door that re-exports them."""
    official = {hook.class_name for hook in OFFICIAL_HOOKS}

    def skipped(_app: Sphinx, what: str, name: str, *_: Any) -> bool | None:
        return True if what == "module" and name in official else None

    app.connect("autodoc-skip-member", skipped)
