"""Two processes that reduce gradients: once a window, and equal to one process with everything."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nvalchemi.errors import CheckpointWarning

PROGRAM = Path(__file__).with_name("two_ranks.py")
two_ranks = SimpleNamespace(**runpy.run_path(str(PROGRAM)))


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """What either rank came to, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks = [
        subprocess.Popen([sys.executable, PROGRAM, str(rank), folder], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def whole(case):
    """Train one process on the micro-batches of both ranks, by the plain loop."""
    settings = two_ranks.CASES[case]
    model = two_ranks.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pairs = list(zip(*(two_ranks.batches_of(rank, settings.get("nan")) for rank in range(2)), strict=True))
    for window in (pairs[:4], pairs[4:]):
        parts = [batch for pair in window for batch in pair]
        if settings.get("on_nonfinite") == "drop":
            parts = [batch for batch in parts if batch[1].isfinite().all()]
        elif not all(batch[1].isfinite().all() for batch in parts):
            continue
        if not parts:
            continue
        weights = [two_ranks.samples(batch) if "weight" in settings else 1 for batch in parts]
        optimizer.zero_grad()
        for weight, (x, y) in zip(weights, parts, strict=True):
            ((model(x) - y).square().mean() * weight / sum(weights)).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("case", two_ranks.CASES)
def test_two_ranks_equal_one_process(ends, case):
    """Weights of both ranks are equal, and those of one process with all micro-batches, also where one has a nan."""
    first, second = (end[case]["weights"] for end in ends)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, whole(case), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", two_ranks.CASES)
def test_gradients_are_reduced_once_a_window(ends, case):
    """Six micro-batches in two windows are two reductions on either rank, whatever is dropped."""
    assert [end[case]["reductions"] for end in ends] == [2, 2]


def test_steps_agree(ends):
    """Both ranks skip the window that is vetoed or empty, and step every other."""
    steps = {case: [end[case]["steps"] for end in ends] for case in two_ranks.CASES}
    assert steps == {**dict.fromkeys(two_ranks.CASES, [2, 2]), "veto": [1, 1], "drop all": [1, 1]}


def test_an_open_window_of_several_ranks_says_what_a_checkpoint_loses(make_strategy, make_batches, monkeypatch):
    """Each rank has its own gradients inside a window: a state warns, and the window is begun anew after a load."""
    batches = make_batches(*6 * [2])
    strategy = make_strategy()
    strategy.train_batch(batches[0])
    monkeypatch.setattr("nvalchemi_hooks_grad_accum.hook._several_ranks", lambda: True)
    with pytest.warns(CheckpointWarning, match="1 of 4 micro-batches are behind, and each rank holds its own part"):
        state = strategy.state_dict()
    monkeypatch.undo()
    resumed = make_strategy()
    resumed.load_state_dict(state)
    for batch in batches[1:4]:
        assert resumed.train_batch(batch).step_skipped
    assert not resumed.train_batch(batches[4]).step_skipped
