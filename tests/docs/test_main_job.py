"""The main job keeps what its page promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHORT = ["--steps", "500", "--precision"]


@pytest.mark.parametrize(("arguments", "times"), [([], 5), ([*SHORT, "bf16"], 3), ([*SHORT, "fp16"], 3)])
def test_averaged_weights_beat_the_trivial_prediction(arguments, times, tmp_path):
    """Energies and forces of the averaged weights are 5 times better than none, 3 times after 500 half steps."""
    script = ROOT / "docs" / "examples" / "molecules" / "train.py"
    figures = tmp_path / "figures.json"
    command = [sys.executable, script, "--json", figures, "--plot", tmp_path / "plot.png", *arguments]
    environment = {**os.environ, "PYTHONSAFEPATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(figures.read_text(encoding="utf-8"))
    for error in ("energy_mae", "force_mae"):
        assert result["averaged"][error] * times < result["baseline"][error]
    assert result["steps"] > 400
