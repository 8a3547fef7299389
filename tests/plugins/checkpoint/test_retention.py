"""Which checkpoints are kept: the last and the best, also over a resume."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.training import load_training
from nvalchemi_hooks_checkpoint import CheckpointHook, best_checkpoint, latest_checkpoint
from nvalchemi_hooks_checkpoint.retention import Retention

BATCHES = [torch.full((2, 1), float(i)) for i in range(1, 5)]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(("keep", "expected"), [(1, [12]), (2, [9, 12]), (9, [3, 6, 9, 12]), (None, [3, 6, 9, 12])])
def test_the_last_ones_are_kept(root, run, steps, keep, expected, asynchronous):
    """Of four saves as many are left as `keep` says, the latest ones."""
    run(CheckpointHook(root=root, every_steps=3, keep=keep, at_end=False, asynchronous=asynchronous), num_steps=13)
    assert steps(root) == expected
    assert latest_checkpoint(root) == root / "step-00000012"
    assert sorted(path.name for path in root.iterdir()) == ["index.json", *(f"step-{step:08}" for step in expected)]


def test_the_best_is_kept_beside_the_last(root, run, steps):
    """A validation that is better than all before is saved by itself, and outlives later saves."""
    hook = CheckpointHook(root=root, every_steps=5, keep=1, best="loss", at_end=False)
    run(hook, losses=[3.0, 1.0, 2.0, 1.5], num_epochs=4)  # at steps 4, 8, 12, 16
    assert steps(root) == [8, 15]
    assert best_checkpoint(root) == root / "step-00000008"


def test_a_better_best_replaces_the_best(root, run, steps):
    """The best before is removed when it is neither best nor among the last."""
    run(CheckpointHook(root=root, best="loss", keep=1), losses=[3.0, 2.0, 4.0, 1.0], num_epochs=4)
    assert steps(root) == [16]


def test_the_best_may_be_the_highest(root, run, steps):
    """With best_mode="max" the highest value of the named result counts."""
    run(CheckpointHook(root=root, best="negated", best_mode="max", keep=1), losses=[3.0, 1.0, 2.0], num_epochs=3)
    assert best_checkpoint(root) == root / "step-00000008"
    run(CheckpointHook(root=root / "max", best="loss", best_mode="max", keep=1), losses=[3.0, 1.0, 2.0], num_epochs=3)
    assert best_checkpoint(root / "max") == root / "max" / "step-00000004"


def test_a_best_whose_step_is_saved_is_not_saved_again(root, run, gate, steps):
    """Where the cadence has saved the step already, it is put down as the best, and kept."""
    run(CheckpointHook(root=root, every_steps=4, keep=1, best="loss"), losses=[3.0, 1.0, 2.0], num_epochs=3)
    assert gate.copies == [4, 8, 12]
    assert steps(root) == [8, 12]
    assert best_checkpoint(root) == root / "step-00000008"


def test_nan_is_never_the_best(root, run, steps):
    """A validation that gave nan saves nothing, also when it is the first; what comes after it counts."""
    run(CheckpointHook(root=root, best="loss", at_end=False), losses=[math.nan, 2.0, math.nan, 3.0], num_epochs=4)
    assert steps(root) == [8]


def test_a_result_that_validation_does_not_give_is_named(root, strategy):
    """The message holds the name that was asked for, and those there are."""
    made = strategy(CheckpointHook(root=root, best="accuracy"), losses=[1.0], num_epochs=1)
    with pytest.raises(ValueError, match=r"best is 'accuracy', but the validation gave \['loss', 'negated'\]"):
        made.run(BATCHES)


def test_validation_inside_an_open_window_saves_no_best(root, run, gate, accumulate):
    """Gradients of an open window are in no checkpoint: the best is left out, unless its step is saved already."""
    run(CheckpointHook(root=root, best="loss"), accumulate(3), losses=[3.0, 2.0, 1.0], num_epochs=3)
    assert gate.copies == [4]  # only the third epoch ends with a step


def test_record_and_best_survive_a_resume(root, strategy, steps):
    """A run that goes on knows what it kept, what was best, and what it has to remove."""
    hook = CheckpointHook(root=root, every_steps=2, keep=2, best="loss")
    first = strategy(hook, losses=[2.0, 1.0], num_epochs=2)
    first.run(BATCHES)
    assert steps(root) == [6, 8]
    again = CheckpointHook(root=root, every_steps=2, keep=2, best="loss")
    second = strategy(again, losses=[1.0, 1.5, 1.7], num_epochs=4)  # the validation of step 8 comes after its save
    load_training(latest_checkpoint(root), second)
    assert second.step_count == 8
    second.run(BATCHES)
    assert steps(root) == [8, 14, 16]
    assert best_checkpoint(root) == root / "step-00000008"


@pytest.mark.parametrize(("keep", "left"), [(2, [2, 3]), (3, [2, 3, 6]), (9, [2, 3, 4, 6])])
def test_a_run_that_goes_on_from_an_earlier_checkpoint_leads_back_to_itself(root, strategy, run, steps, keep, left):
    """The latest is what was written last, not the highest step; what was given up is the first to be removed."""
    run(CheckpointHook(root=root, every_steps=2, keep=3), num_steps=6)
    assert steps(root) == [2, 4, 6]
    other = strategy(CheckpointHook(root=root, every_steps=1, keep=keep), num_steps=3)
    load_training(root / "step-00000002", other)
    other.run(BATCHES)
    assert steps(root) == left
    assert latest_checkpoint(root) == root / "step-00000003"


def test_a_step_that_is_saved_is_not_saved_again_after_a_resume(root, run, strategy, gate):
    """The first save of a run that goes on is one that it was not loaded from."""
    run(CheckpointHook(root=root, every_steps=4, every_epochs=1), num_steps=4)
    second = strategy(CheckpointHook(root=root, every_steps=4, every_epochs=1), num_steps=8)
    load_training(latest_checkpoint(root), second)
    second.run(BATCHES)
    assert gate.copies[0] == 4
    assert gate.copies == sorted(set(gate.copies))


def test_an_incomplete_checkpoint_is_not_the_latest(root, run):
    """A folder without its manifest is what a write leaves that was killed, and is passed over."""
    run(CheckpointHook(root=root, every_steps=2), num_steps=4)
    (root / "step-00000004" / "manifest.json").unlink()
    assert latest_checkpoint(root) == root / "step-00000002"


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"kept": 3}'])
def test_without_an_index_the_highest_step_is_the_latest(root, run, content):
    """The index helps to find checkpoints; lost or damaged, they are found by their names."""
    run(CheckpointHook(root=root, every_steps=2), num_steps=4)
    (root / "index.json").unlink()
    if content is not None:
        (root / "index.json").write_text(content)
    assert latest_checkpoint(root) == root / "step-00000004"
    assert best_checkpoint(root) is None


@pytest.mark.parametrize("other", [{"best": "negated"}, {"best_mode": "max"}, {"best": None, "every_steps": 1}])
def test_another_metric_begins_anew(root, run, other):
    """The best by one metric is not the best by another."""
    hook = CheckpointHook(root=root, best="loss")
    run(hook, losses=[1.0], num_epochs=1)
    changed = CheckpointHook(**{"root": root, "best": "loss", **other})
    changed.load_state_dict(hook.state_dict())
    assert (changed.state_dict()["values"], changed.state_dict()["kept"]) == ({}, ["step-00000004"])


GOOD = {"folder": "a", "kept": ["step-00000001"], "values": {}, "metric": "loss", "mode": "min"}


@pytest.mark.parametrize("bad", [
    {"kept": None}, {"kept": ["../../home"]}, {"kept": ["step-1"]}, {"folder": 1}, {"values": None},
    {"values": {"step-00000002": 1.0}}, {"values": {"step-00000001": "1.0"}},
])  # fmt: skip
def test_a_state_that_is_none_is_refused(root, run, bad):
    """A state with a path in it, or with a best that is not kept, changes nothing."""
    hook = CheckpointHook(root=root, every_steps=1, best="loss")
    run(hook, losses=[1.0], num_epochs=1)
    before = hook.state_dict()
    for state in ({**GOOD, **bad}, {"kept": []}):
        with pytest.raises(ValueError, match=r"give what CheckpointHook.state_dict\(\) returned"):
            hook.load_state_dict(state)
    assert hook.state_dict() == before


@settings(max_examples=200, deadline=None)
@given(
    saves=st.lists(st.tuples(st.integers(1, 9), st.none() | st.floats(allow_nan=True), st.booleans()), max_size=12),
    keep=st.none() | st.integers(1, 4),
    mode=st.sampled_from(["min", "max"]),
)
def test_what_is_left_is_the_last_and_the_best(saves, keep, mode):
    """Whatever is saved, lost, and however good: the last k and the best of those written are left, and no others."""
    record, step, done, waiting = Retention(keep=keep, metric="loss", mode=mode), 0, [], []

    def settle(leave):
        while len(waiting) > leave:
            name, value, is_lost = waiting.pop(0)
            if is_lost:
                record.forget(name)
                continue
            record.written(name)
            done.append((name, value))
            for surplus in record.surplus():
                record.forget(surplus)

    for gap, value, is_lost in saves:
        step += gap
        settle(leave=1)
        if value is not None and not record.is_sure(value):
            settle(leave=0)
        better = value is not None and record.improves(value)
        waiting.append((record.add(step, best_value=value if better else None), value, is_lost))
    settle(leave=0)
    values = [(name, value) for name, value in done if value is not None and not math.isnan(value)]
    best = (min if mode == "min" else max)(values, key=lambda pair: pair[1], default=(None, None))
    names = [name for name, _ in done]
    last = names if keep is None else names[-keep:]
    assert record.names == [name for name in names if name in last or name == best[0]]
    assert (record.best, record.values.get(record.best)) == best
