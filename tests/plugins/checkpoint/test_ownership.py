"""Whose checkpoints a folder holds: a run removes its own, and nothing that others put there."""

from __future__ import annotations

import os
import shutil
from os.path import samestat
from pathlib import Path

import pytest
import torch

from nvalchemi.training import load_training
from nvalchemi_hooks_checkpoint import CheckpointHook, latest_checkpoint

BATCHES = [torch.full((2, 1), float(i)) for i in range(1, 5)]


@pytest.fixture
def go_on(strategy):
    """Go on from the latest checkpoint in `source`, and save in `root`."""

    def run(source: Path, root: Path, *, num_steps: int, **settings):
        made = strategy(CheckpointHook(root=root, **{"every_steps": 1, "keep": 2, **settings}), num_steps=num_steps)
        load_training(latest_checkpoint(source), made)
        made.run(BATCHES)
        return made

    return run


def test_a_run_from_elsewhere_removes_no_checkpoint_of_another(root, tmp_path, run, go_on, steps):
    """Loaded from its own folder, a run is no more allowed in that of another than a new one, whatever the steps."""
    run(CheckpointHook(root=root, every_steps=1, keep=None), num_steps=5)
    run(CheckpointHook(root=tmp_path / "other", every_steps=1), num_steps=3)
    with pytest.raises(FileExistsError, match=r"holds checkpoints of another run, step-00000005 .*load_training\("):
        go_on(tmp_path / "other", root, num_steps=9)
    assert steps(root) == [1, 2, 3, 4, 5]


def test_a_run_that_goes_on_in_a_new_folder_leaves_the_old_one(root, tmp_path, run, go_on, steps):
    """It begins a record there that it knows again, and has no right to the old folder any more."""
    run(CheckpointHook(root=root, every_steps=1), num_steps=4)
    new = tmp_path / "new"
    made = go_on(root, new, num_steps=6)
    (hook,) = (one for one in made.hooks if isinstance(one, CheckpointHook))
    assert hook.state_dict()["kept"] == ["step-00000005", "step-00000006"]
    assert (steps(root), steps(new)) == ([2, 3, 4], [5, 6])
    go_on(new, new, num_steps=8)
    assert (steps(root), steps(new)) == ([2, 3, 4], [7, 8])
    with pytest.raises(FileExistsError):
        go_on(new, root, num_steps=9)
    assert steps(root) == [2, 3, 4]


def test_a_folder_that_was_moved_is_still_that_of_its_run(root, tmp_path, run, go_on, steps):
    """A run knows its folder by what is in it, not by its path: it goes on there, and removes what is superfluous."""
    run(CheckpointHook(root=root, every_steps=1, keep=2), num_steps=3)
    moved = tmp_path / "moved"
    root.rename(moved)
    go_on(moved, moved, num_steps=5)
    assert steps(moved) == [4, 5]


@pytest.mark.parametrize("content", [None, "", "[" * 100_000, '{"kept": ["step-00000003"]}'])
def test_without_an_index_nobody_is_let_in(root, tmp_path, run, go_on, steps, content):
    """Whose the checkpoints are is not known then; they load all the same, and the run goes on in another folder."""
    run(CheckpointHook(root=root, every_steps=1), num_steps=3)
    (root / "index.json").unlink()
    if content is not None:
        (root / "index.json").write_text(content)
    with pytest.raises(FileExistsError, match=r"step-00000003 for example, but no index.json .*Give another root"):
        go_on(root, root, num_steps=5)
    assert steps(root) == [1, 2, 3]
    go_on(root, tmp_path / "new", num_steps=5)
    assert steps(tmp_path / "new") == [4, 5]


def test_a_state_taken_over_while_the_hook_is_at_work_is_checked_too(root, tmp_path, strategy, run, steps):
    """In the middle of a loop of one's own, that of another run ends the right to the folder at the next save."""
    run(CheckpointHook(root=tmp_path / "other", every_steps=1), num_steps=3)
    hook = CheckpointHook(root=root, every_steps=1, keep=1)
    made = strategy(hook, num_steps=99)
    with hook:
        made.train_batch(BATCHES[0])
        load_training(latest_checkpoint(tmp_path / "other"), made)
        with pytest.raises(FileExistsError):
            made.train_batch(BATCHES[0])
    assert steps(root) == [1]


def test_a_folder_that_another_run_has_taken_meanwhile_is_not_the_own_any_more(root, run, steps):
    """Between two runs of one hook its folder may be removed; it is made anew, unless another run saves there now."""
    hook = CheckpointHook(root=root, every_steps=1, keep=2)
    made = run(hook, num_steps=3)
    shutil.rmtree(root)
    made.run(BATCHES)
    assert steps(root) == [5, 6]
    assert hook.state_dict()["kept"] == ["step-00000005", "step-00000006"]
    hook.close()
    shutil.rmtree(root)
    run(CheckpointHook(root=root, every_steps=1, keep=None), num_steps=3)
    with pytest.raises(FileExistsError):
        made.run(BATCHES)
    assert steps(root) == [1, 2, 3]


def test_a_state_is_taken_over_after_what_is_being_written(root, strategy, gate, steps):
    """Going back to an earlier checkpoint waits for the writes under way, so that the record has them all."""
    hook = CheckpointHook(root=root, every_steps=1, keep=2)
    made = strategy(hook, num_steps=99)
    with hook:
        made.train_batch(BATCHES[0])
        hook.flush()
        gate.open_soon()
        made.train_batch(BATCHES[0])
        load_training(root / "step-00000001", made)
        assert steps(root) == [1, 2]
        assert hook.state_dict()["kept"] == ["step-00000002", "step-00000001"]


def test_the_state_of_a_new_hook_gives_no_right_to_the_folder(root, run, strategy):
    """Taking back a load that failed leaves a hook as new: another run's checkpoints are not its own."""
    run(CheckpointHook(root=root, every_steps=2), num_steps=4)
    hook = CheckpointHook(root=root, every_steps=2)
    hook.load_state_dict(hook.state_dict())
    assert hook.state_dict()["kept"] == []
    with pytest.raises(FileExistsError):
        strategy(hook, num_steps=4).run(BATCHES)


def test_in_another_folder_there_is_nothing_to_keep(root, run):
    """A record is worth what its checkpoints are: loaded for a folder without them, it is empty."""
    hook = CheckpointHook(root=root, best="loss")
    run(hook, losses=[1.0], num_epochs=1)
    moved = CheckpointHook(root=root / "other", best="loss")
    moved.load_state_dict(hook.state_dict())
    assert moved.state_dict() == CheckpointHook(root=root / "other", best="loss").state_dict()


@pytest.mark.parametrize("kind", ["file", "link to nothing", "link to a folder"])
def test_what_only_bears_the_name_of_a_checkpoint_is_left_alone(root, tmp_path, run, go_on, steps, kind):
    """A file or a link with such a name does not stop a run that goes on, and stays as it is."""
    run(CheckpointHook(root=root, every_steps=1, keep=2), num_steps=3)
    other, elsewhere = root / "step-00000077", tmp_path / "elsewhere"
    if kind == "file":
        other.write_text("notes")
    else:
        other.symlink_to(elsewhere)
    if kind == "link to a folder":
        elsewhere.mkdir()
        (elsewhere / "notes").touch()
    go_on(root, root, num_steps=5)
    assert steps(root) == [4, 5]
    assert os.path.lexists(other)
    assert (elsewhere / "notes").exists() == (kind == "link to a folder")


def test_of_a_link_to_a_checkpoint_only_the_link_is_removed(root, tmp_path, run, go_on, steps):
    """A checkpoint that was put elsewhere, with a link in its place, is whole when it is no longer kept."""
    run(CheckpointHook(root=root, every_steps=1, keep=2), num_steps=3)
    elsewhere = tmp_path / "elsewhere"
    shutil.move(root / "step-00000003", elsewhere)
    (root / "step-00000003").symlink_to(elsewhere)
    go_on(root, root, num_steps=6)
    assert sorted(path.name for path in root.iterdir()) == ["index.json", "step-00000005", "step-00000006"]
    assert (elsewhere / "manifest.json").exists()


@pytest.mark.skipif(os.name != "posix", reason="only there a folder can be flushed to the disk")
def test_a_checkpoint_is_in_its_folder_for_good_before_an_earlier_one_goes(root, run, monkeypatch, steps):
    """The names in the folder are flushed to the disk while the old and the new are both there, and so is its own."""
    flush, seen = os.fsync, []

    def fsync(descriptor):
        flush(descriptor)
        flushed = os.fstat(descriptor)
        seen.extend((one, steps(root)) for one in (root, root.parent) if one.exists() and samestat(flushed, one.stat()))

    monkeypatch.setattr(os, "fsync", fsync)
    run(CheckpointHook(root=root, every_steps=2, keep=1), num_steps=4)
    assert seen[0] == (root.parent, [])
    assert (root, [2, 4]) in seen
