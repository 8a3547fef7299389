"""The card of the plugin."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from nvalchemi_hooks_checkpoint import CheckpointHook

CARD = (Path(__file__).parents[3] / "plugins" / "checkpoint" / "README.md").read_text(encoding="utf-8")


def test_the_program_of_the_card_runs(tmp_path):
    """What the card shows is what happens: the last save is found, and the run goes on there."""
    (program,) = re.findall(r"```python\n(.*?)```", CARD, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "kept: step-00000020\ngoes on at step 20\n"


@pytest.mark.parametrize("setting", sorted(CheckpointHook.__init__.__kwdefaults__))
def test_the_card_has_every_setting_with_its_default(setting):
    """Each argument of the hook stands in the table with the default that it has."""
    default = CheckpointHook.__init__.__kwdefaults__[setting]
    shown = f'"{default}"' if isinstance(default, str) else default
    assert f"| `{setting}` | `{shown}` |" in CARD
