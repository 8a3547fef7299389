"""The example of a stranger's distribution: built as a wheel, installed beside the core, found by name, and tested."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "third-party-hook"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy, so that building leaves nothing in the tree."""
    return shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("source") / "third-party-hook")


@pytest.fixture(scope="module")
def installed(install, source):
    return install(source)


def test_it_is_listed_from_its_metadata(installed):
    """The list has its name, distribution, version and the range of cores it was made for."""
    listed = {hook["name"]: hook for hook in json.loads(installed.run("-m", "nvalchemi", "hooks", "list", "--json"))}
    hook = listed["grad_centralization"]
    assert (hook["distribution"], hook["version"], hook["state"]) == ("grad-centralization", "0.1.0", "available")
    assert hook["api_range"] == "<0.2,>=0.1"


def test_a_strategy_that_names_it_trains_with_it(installed, source, tmp_path):
    """The program of its card runs, and the rows of the weights keep their sums, as the method promises."""
    [program] = re.findall(r"```python\n(.*?)```", (source / "README.md").read_text(), re.DOTALL)
    program = program.replace("import torch\n", "import torch\ntorch.manual_seed(0)\n", 1)
    (tmp_path / "program.py").write_text(program)
    assert installed.run("program.py", cwd=tmp_path) == "sums of the rows kept: True\n"
    (tmp_path / "without.py").write_text(program.replace('hooks=["grad_centralization"],', ""))
    assert installed.run("without.py", cwd=tmp_path) == "sums of the rows kept: False\n"


def test_it_passes_the_kit_and_its_own_tests(installed, source):
    """Its tests pass as they stand, the kit's among them, and its docstrings are true."""
    output = installed.run("-m", "pytest", "-p", "no:cacheprovider", cwd=source)
    assert re.search(r"TestGradCentralizationHook: 2\d checks run", output)
    installed.run("-m", "pytest", "-p", "no:cacheprovider", "--doctest-modules", "--pyargs", "grad_centralization",
                  cwd=source)  # fmt: skip
