"""Whatever the pages of the site tell a reader to type works, in the order in which it stands there."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [DOCS / "tutorial" / "first-hook.md", *sorted((DOCS / "how-to").glob("[!i]*.md"))]
DESCRIBING = sorted(page for room in ("explanation", "plugins", "reference") for page in (DOCS / room).glob("*.md"))
SCRIPTS = {"nvalchemi": "from nvalchemi.cli import main", "pip": "from pip._internal.cli.main import main"}
END = "end of the block"
SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture
def environment(tmp_path):
    """An empty virtual environment that sees what is installed here, and asks no registry for anything."""
    folder = tmp_path / "venv"
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    seen = [f"import site; site.addsitedir({path!r})\n" for path in sys.path if path.endswith("-packages")]
    (packages / "seen.pth").write_text("".join(seen))
    for name, line in SCRIPTS.items():
        script = folder / "bin" / name
        script.write_text(f"#!{folder}/bin/python\n{line}\nraise SystemExit(main())\n")
        script.chmod(0o755)
    alone = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # pip reads the latter inverted
    return {**os.environ, **alone, "PATH": f"{folder}/bin:{os.environ['PATH']}"}


def _blocks(page):
    """Return language and text of every block; one in a list is indented."""
    found = re.findall(r"^( *)```(\w*)\n(.*?)^\1```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [(language, re.sub(f"^{indent}", "", text, flags=re.MULTILINE)) for indent, language, text in found]


def _commands(language, text):
    """Return what a shell has to do for a block: run it, run it as a program, or write it to the file it names."""
    if language == "sh":
        return text
    name = re.match(r"# ([\w./-]+\.\w+)\n", text)
    path = name[1] if name else "program.py"
    written = f"cat > {path} <<'{END}'\n{text}{END}\n"
    return written if name else f"{written}python program.py\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_tells_to_type_works(page, environment, tmp_path):
    """Commands, programs and files of a page, in order, in an empty folder beside a clone; what is shown is printed."""
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "nvalchemi-hooks").symlink_to(ROOT)
    blocks = _blocks(page)
    script = f"echo {END!r}\n".join(_commands(*block) for block in blocks if block[0] != "text")
    done = subprocess.run(
        ["bash", "-euo", "pipefail"], input=script, cwd=folder, env=environment, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    outputs, printed = iter(done.stdout.split(f"{END}\n")), ""
    for language, text in blocks:
        if language != "text":
            printed = next(outputs)
        else:
            assert doctest.OutputChecker().check_output(text, printed, SAME), f"{printed}\nis not\n{text}"


@pytest.mark.parametrize("page", DESCRIBING, ids=lambda page: page.stem)
def test_pages_that_describe_show_nothing_that_is_not_run(page):
    """A program on one of these pages would be run by nobody: it belongs to a how-to page or into a docstring."""
    assert not {language for language, _ in _blocks(page)} & {"python", "sh"}
