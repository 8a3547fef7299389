"""The site is built without a warning, and leaves nothing out: no public name, stage, hook, plugin or option."""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sphinx.util.inventory import InventoryFile

from nvalchemi.cli.app import build_parser
from nvalchemi.hooks import list_hooks
from nvalchemi.hooks.plugins.specs import HOOK_API_VERSION
from nvalchemi.official import OFFICIAL_HOOKS
from nvalchemi.training import TrainingStage
from nvalchemi.training.checkpoint.manifest import FORMAT

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DOORS = ["nvalchemi.errors", "nvalchemi.hooks", "nvalchemi.testing", "nvalchemi.training", "nvalchemi.training.hooks"]
PLUGINS = sorted(path.parent.name for path in (ROOT / "plugins").glob("*/pyproject.toml"))
MODULES = [*DOORS, *(f"nvalchemi_hooks_{name.replace('-', '_')}" for name in PLUGINS)]
PUBLIC = [(module, name) for module in MODULES for name in importlib.import_module(module).__all__]
SECTIONS = [part for path in DOCS.rglob("*.md") for part in re.split(r"^#+ ", path.read_text("utf-8"), flags=re.M)]


def _options(parser):
    """Give every option and argument of a command line, with the command it belongs to."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _options(command)
        elif not isinstance(action, argparse._HelpAction):
            yield parser.prog, action.option_strings[-1] if action.option_strings else action.dest


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built as `tox -e docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", folder / "trees", DOCS, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def described(site):
    """Every name that the reference describes."""
    with (site / "objects.inv").open("rb") as file:
        kinds = InventoryFile.load(file, "", lambda _, name: name)
    return {name for kind, names in kinds.items() if kind.startswith("py:") for name in names}


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_every_public_name_is_described(described, module, name):
    """It stands in the reference under the module it is imported from, or where its own plugin describes it."""
    hook = next((hook for hook in OFFICIAL_HOOKS if hook.class_name == name), None)
    assert {f"{module}.{name}", f"{hook.module}.{name}" if hook else ""} & described


@pytest.mark.parametrize("stage", TrainingStage)
def test_every_stage_is_described_and_drawn(site, described, stage):
    """The reference says what holds there, and the picture of the loop has it, with a link that leads to it."""
    name = f"nvalchemi.training.TrainingStage.{stage.name}"
    assert name in described
    page = (site / "explanation" / "stages.html").read_text(encoding="utf-8")
    assert len(re.findall(f'<a href="../reference/training.html#{name}">', page)) == 1


@pytest.mark.parametrize("plugin", PLUGINS)
def test_every_plugin_has_its_card_on_the_site(site, plugin):
    """The card is a page: its last section is there, and each of its hooks by name."""
    page = (site / "plugins" / f"{plugin}.html").read_text(encoding="utf-8")
    assert "References" in page
    names = [hook.name for hook in list_hooks() if hook.distribution == f"nvalchemi-hooks-{plugin}"]
    assert names
    assert [name for name in names if name not in page] == []


@pytest.mark.parametrize(("command", "option"), list(_options(build_parser())))
def test_every_option_stands_on_a_page(command, option):
    """A section that names the command names its option, as code, or has something in the place of its argument."""
    about = [section for section in SECTIONS if re.search(rf"\b{command}\b", section)]
    written = rf"`[^`]*(?<![\w-]){option}(?![\w-])" if option.startswith("-") else rf"\b{command} \S"
    assert any(re.search(written, section) for section in about)


def test_the_numbers_of_the_contracts_are_those_of_the_code():
    """The page on versions has the number of the hook API and of the format of checkpoints."""
    page = (DOCS / "versions.md").read_text(encoding="utf-8")
    assert re.findall(r"this core speaks hook API (\d+)", page) == [str(HOOK_API_VERSION)]
    assert re.findall(r"format number, (\d+) so far", page) == [str(FORMAT)]
