"""When a run is saved, and when not."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage, load_training
from nvalchemi_hooks_checkpoint import CheckpointHook, latest_checkpoint

BATCHES = [torch.full((2, 1), float(i)) for i in range(1, 5)]  # as `run` has them


@pytest.mark.parametrize(("settings", "expected"), [
    ({"every_steps": 3}, [3, 6, 9, 12]),
    ({"every_epochs": 1}, [4, 8, 12]),
    ({"every_epochs": 2}, [8]),
    ({"every_steps": 2, "every_epochs": 1}, [2, 4, 6, 8, 10, 12]),
])  # fmt: skip
def test_it_saves_every_so_many_steps_and_epochs(root, run, gate, settings, expected):
    """Steps and epochs are counted from the beginning of training; a step that is due twice is saved once."""
    run(CheckpointHook(root=root, at_end=False, **settings), num_epochs=3)
    assert gate.copies == expected
    assert gate.written == [f"step-{step:08}" for step in expected]


def test_the_end_of_a_run_is_saved(root, run, gate):
    """A run whose last step was not due is saved when it ends; one whose last step is saved already is not again."""
    run(CheckpointHook(root=root, every_steps=3), num_steps=7)
    assert gate.copies == [3, 6, 7]
    run(CheckpointHook(root=root / "due", every_steps=3), num_steps=6)
    assert gate.copies == [3, 6, 7, 3, 6]


def test_a_run_that_ends_by_an_error_saves_nothing_more(root, strategy, gate):
    """What it saved before stays the latest; the moment of the error is no checkpoint."""
    made = strategy(CheckpointHook(root=root, every_steps=2), num_steps=9)
    with pytest.raises(TypeError):
        made.run([torch.ones(2, 1)] * 3 + [None])
    assert gate.copies == [2]


@pytest.mark.parametrize(
    ("first", "last"), [({"num_steps": 6}, {"num_steps": 11}), ({"num_epochs": 1}, {"num_epochs": 3})]
)
def test_a_longer_run_goes_on_from_the_end_of_a_shorter_one(root, run, strategy, first, last):
    """Loaded from its last checkpoint, in the middle of a pass or after one, it equals the long run bit for bit."""
    straight = run(**last)
    run(CheckpointHook(root=root, every_steps=100), **first)
    longer = strategy(CheckpointHook(root=root, every_steps=100), **last)
    load_training(latest_checkpoint(root), longer)
    longer.run(BATCHES)
    assert (longer.step_count, longer.epoch) == (straight.step_count, straight.epoch)
    assert torch.equal(longer.models["main"].weight, straight.models["main"].weight)


def test_a_vetoed_step_saves_nothing(root, run, gate, veto):
    """Batches whose step was vetoed leave the count where it is, and it is not saved again."""
    run(CheckpointHook(root=root, every_steps=2), veto(0, 1, 4, 5, 6), num_steps=4)
    assert gate.copies == [2, 4]


def test_an_epoch_whose_last_step_was_vetoed_is_saved_once(root, run, gate, veto):
    """The end of such an epoch is a new moment, unless its step count is saved already."""
    run(CheckpointHook(root=root, every_steps=6, every_epochs=1), veto(3, 7), num_epochs=2)
    assert gate.copies == [3, 6]  # at the end of an epoch, and by steps one batch before the end of the next


def test_a_batch_in_an_open_window_saves_nothing(root, run, gate, accumulate):
    """Accumulating over three batches saves once a step, after the batch that completes it."""
    hook = CheckpointHook(root=root, every_steps=1)
    made = run(hook, accumulate(3), num_steps=4)
    assert made.batch_count == 12
    assert gate.copies == [1, 2, 3, 4]


def test_an_epoch_that_ends_in_an_open_window_is_saved_after_the_next_step(root, run, gate, accumulate):
    """Four batches an epoch, a step at every third: the first epoch ends inside a window, and step 2 is its save."""
    run(CheckpointHook(root=root, every_epochs=1), accumulate(3), num_epochs=3)
    # after epoch 0: batch 4, open -> step 2 at batch 6; after epoch 1: batch 8, open -> step 3; epoch 2 ends at step 4
    assert gate.copies == [2, 3, 4]


def test_nothing_but_rank_zero_saves(root, gate):
    """Another rank takes no copy, writes nothing, and makes no folder."""
    hook = CheckpointHook(root=root, every_steps=1, every_epochs=1, best="loss")
    for stage in TrainingStage:
        hook(TrainContext(global_rank=1, step_count=1, workflow=object(), validation={"loss": 1.0}), stage)
    hook.close()
    assert (gate.copies, root.exists()) == ([], False)


def test_a_checkpoint_is_the_run_at_its_step(root, run, strategy):
    """What is loaded has the weights and counters of the step it is named after, not those of a later one."""
    straight = run(num_steps=3)
    run(CheckpointHook(root=root, every_steps=3, keep=None), num_steps=8)
    loaded = strategy(CheckpointHook(root=root, every_steps=3, keep=None), num_steps=8)
    load_training(root / "step-00000003", loaded)
    assert (loaded.step_count, loaded.batch_count, loaded.epoch, loaded.epoch_step_count) == (3, 3, 0, 3)
    assert torch.equal(loaded.models["main"].weight, straight.models["main"].weight)


def test_saving_changes_no_number(root, run):
    """A run that saves at every step ends with the weights and the random numbers of one that never does."""
    plain = run(num_steps=7)
    drawn = torch.rand(3)
    saving = run(CheckpointHook(root=root, every_steps=1), num_steps=7)
    assert torch.equal(drawn, torch.rand(3))
    assert torch.equal(plain.models["main"].weight, saving.models["main"].weight)


def test_without_a_run_to_save_it_says_so(root):
    """In a loop of one's own the context has to name what is saved."""
    hook = CheckpointHook(root=root, every_steps=1)
    with pytest.raises(RuntimeError, match=r"saves ctx.workflow, which is None; run it in a TrainingStrategy, or give"):
        hook(TrainContext(step_count=1), TrainingStage.AFTER_BATCH)


class Loop:
    """A loop of one's own: a number, and how to save it."""

    step_count = 0

    def state_dict(self):
        return {"loop": {"step_count": self.step_count}}

    def load_state_dict(self, state, *, fresh=()):
        self.step_count = state["loop"]["step_count"]


def test_it_saves_a_loop_of_ones_own(root):
    """Anything with a state can be saved: it is what the context names as the workflow."""
    loop, hook = Loop(), CheckpointHook(root=root, every_steps=2)
    with hook:
        for loop.step_count in range(1, 6):
            hook(TrainContext(step_count=loop.step_count, workflow=loop), TrainingStage.AFTER_BATCH)
    other = Loop()
    load_training(latest_checkpoint(root), other)
    assert other.step_count == 4


def test_the_folder_of_another_run_is_refused_before_training(root, run, strategy, steps):
    """A new run does not overwrite the checkpoints of an old one: it stops before its first batch."""
    run(CheckpointHook(root=root, every_steps=2), num_steps=4)
    new = strategy(CheckpointHook(root=root, every_steps=2), num_steps=4)
    with pytest.raises(FileExistsError, match=r"holds checkpoints of another run, step-00000004 .*load_training\("):
        new.run([torch.ones(1, 1)])
    assert new.batch_count == 0
    assert steps(root) == [2, 4]


def test_a_second_run_of_a_strategy_goes_on_in_its_folder(root, run, steps):
    """One hook saves through two runs of one strategy."""
    made = run(CheckpointHook(root=root, every_steps=2), num_steps=4)
    made.run([torch.ones(1, 1)] * 4)
    assert steps(root) == [4, 6, 8]


def test_two_hooks_do_not_share_a_folder(root, run):
    """Two at work in one folder would remove each other's checkpoints: the second is refused."""
    first, second = CheckpointHook(root=root, every_steps=2), CheckpointHook(root=root / ".", best="loss")
    with pytest.raises(ValueError, match="in use by another CheckpointHook; give each a root of its own"):
        run(hooks={"steps": first, "best": second}, losses=[1.0] * 9, num_steps=4)


def test_a_folder_that_cannot_be_made_is_found_before_training(tmp_path, strategy):
    """A root below a file stops the run before its first batch."""
    (tmp_path / "file").touch()
    made = strategy(CheckpointHook(root=tmp_path / "file" / "below", every_steps=100), num_steps=4)
    with pytest.raises(OSError, match="file"):
        made.run([torch.ones(1, 1)])
    assert made.batch_count == 0
