"""The classifier with a loop of its own, run as a user runs it."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "classifier" / "train.py"


def test_the_classifier_learns_and_its_broken_batch_is_vetoed(tmp_path):
    """Both sets of weights tell the spirals apart, and the one broken batch moved neither of them."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT)], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    counts, live, averaged = done.stdout.splitlines()
    steps, vetoed, clipped = map(int, re.findall(r"\d+", counts))
    assert (steps, vetoed) == (599, 1)
    assert 0 < clipped < steps
    for line in (live, averaged):
        assert float(re.search(r"([\d.]+)%", line).group(1)) > 95
    assert not list(tmp_path.iterdir())


def test_the_classifier_is_as_short_as_promised():
    """What is more than a screenful is no example of how little it takes."""
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) <= 35
