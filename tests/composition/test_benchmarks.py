"""The benchmarks run, and their files have the form that their help promises; the figures are not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a user does."""
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *options], capture_output=True, text=True, check=False
    )


def rows_of(script: str, *options: str, file: Path) -> dict[str, dict]:
    """Run a script and return the rows of its JSON by name, each of the promised form."""
    done = run(script, *options, "--json", str(file))
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())
    for row in rows:
        assert set(row) == {"row", "value", "target", "holds", "peer"}
        judged = row["value"] is not None and row["target"] is not None
        assert row["holds"] in ((True, False) if judged else (None,)), row
        assert not row["holds"] or row["value"] <= row["target"], row
        assert all(isinstance(value, int | float) or value == "not installed" for value in row["peer"].values()), row
        assert row["row"].partition(",")[0][:20] in done.stdout
    return {row["row"]: row for row in rows}


def test_a_quick_run_measures_every_row(tmp_path):
    """Counts are those that the targets ask for, and every row of a ratio or a time has a figure and a target."""
    rows = rows_of("run.py", "--quick", file=tmp_path / "figures.json")
    for name, row in rows.items():
        assert row["target"] is not None, row
        assert row["value"] is not None or "Triton" in name, row
    exact = ("host reads", "bytes", "operations", "tensors")
    counted = {name: row for name, row in rows.items() if name.startswith(exact)}
    assert len(counted) == 7
    assert all(row["holds"] is not False for row in counted.values()), counted
    assert rows["bytes a parameter, all plugins on, fused AdamW in fp32"]["value"] == 48


def test_what_a_save_costs_is_measured(tmp_path):
    """The benchmark of saving prints what training waits, beside one clone and torch.save of the same state."""
    done = run("checkpoint_save.py", "--parameters", "1e5", "--repeat", "1", "--root", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [line.split("  ")[0] for line in done.stdout.splitlines()[2:]] == [
        "one clone of the state", "torch.save of the state", "training waits for a save", "the save is complete after",
    ]  # fmt: skip


def test_the_gpu_script_rehearses_on_a_cpu(tmp_path):
    """All paths come to equal numbers, host reads are as few as promised, and each size stands beside its floor."""
    rows = rows_of("gpu.py", "--device", "cpu", file=tmp_path / "figures.json")
    judged = [name for name, row in rows.items() if row["holds"] is not None]
    assert all(rows[name]["holds"] for name in judged)
    assert {name.partition(" against")[0] for name in judged if " against" in name} >= {"lazy", "plain", "naive"}
    timed = {name: row for name, row in rows.items() if "parameters" in name}
    assert all(row["value"] > 0 and row["peer"]["floor"] > 0 for row in timed.values())
    floor = {name.split(", ")[1]: row["peer"]["floor"] for name, row in timed.items()}
    assert floor["EMA"] * 4 == pytest.approx(floor["folded"], rel=1e-2)  # 12 and 48 bytes


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, and the script would go to work")
def test_without_a_gpu_the_script_says_so():
    """It prints one sentence and exits with 2."""
    done = run("gpu.py")
    assert done.returncode == 2
    assert "no GPU" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("script", ["run.py", "gpu.py"])
def test_help_says_what_the_json_holds(script):
    """Somebody who asks for help learns the options and the form of the file."""
    done = run(script, "--help")
    assert done.returncode == 0
    assert "--json FILE" in done.stdout
    assert "JSON" in done.stdout
