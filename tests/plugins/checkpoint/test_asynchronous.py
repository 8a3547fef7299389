"""Writing while training goes on: what waits, for what, and how much is held."""

from __future__ import annotations

import copy
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage, load_training
from nvalchemi_hooks_checkpoint import CheckpointHook, best_checkpoint, latest_checkpoint

BATCHES = [torch.full((2, 1), float(i)) for i in range(1, 5)]


def batch(hook, strategy):
    """Trains one batch as a run does."""
    return strategy.train_batch(BATCHES[strategy.batch_count % 4])


def test_training_goes_on_while_a_checkpoint_is_written(root, strategy, gate, steps):
    """With the writer held up, further steps are taken; let go, it writes the state of the step it was told to save."""
    hook = CheckpointHook(root=root, every_steps=3)
    made = strategy(hook, num_steps=99)
    gate.opened.clear()
    with hook:
        for _ in range(5):
            batch(hook, made)
        assert gate.arrived.wait(60)
        assert (made.step_count, steps(root)) == (5, [])
        gate.opened.set()
    assert steps(root) == [3]
    loaded = strategy(CheckpointHook(root=root, every_steps=3), num_steps=99)
    load_training(root / "step-00000003", loaded)
    straight = strategy(num_steps=99)
    for _ in range(3):
        batch(None, straight)
    assert torch.equal(loaded.models["main"].weight, straight.models["main"].weight)
    assert threading.get_ident() not in gate.threads


def test_a_second_save_waits_for_its_copy_only(root, strategy, gate):
    """A save that is due while one is being written is copied at once: steps go on, and both are written."""
    hook = CheckpointHook(root=root, every_steps=2, keep=None)
    made = strategy(hook, num_steps=99)
    gate.opened.clear()
    with hook:
        for _ in range(5):
            batch(hook, made)
        assert gate.arrived.wait(60)
        assert (gate.copies, gate.written) == ([2, 4], [])
        gate.opened.set()
    assert gate.written == ["step-00000002", "step-00000004"]


def test_a_third_save_waits_and_holds_no_third_copy(root, strategy, gate):
    """With one being written and one waiting, a save waits before it copies; none is left out, and all are in order."""
    hook = CheckpointHook(root=root, every_steps=1, keep=None)
    made = strategy(hook, num_steps=99)
    gate.opened.clear()
    with hook:
        batch(hook, made)
        batch(hook, made)
        third = threading.Thread(target=batch, args=(hook, made))
        third.start()
        third.join(0.3)
        assert third.is_alive()
        assert gate.copies == [1, 2]
        gate.opened.set()
        third.join(60)
        for _ in range(5):
            batch(hook, made)
    assert gate.copies == list(range(1, 9))
    assert gate.written == [f"step-{step:08}" for step in range(1, 9)]
    assert gate.most_alive == 2
    assert gate.alive == 0


def test_a_validation_waits_for_no_write_on_which_nothing_hangs(root, strategy, gate):
    """With the best still being written, a worse result and a better one are known for what they are at once."""
    hook = CheckpointHook(root=root, best="loss", keep=1)
    made = strategy(hook, losses=[3.0, 2.0, 4.0, 1.0], num_steps=99)
    with hook:
        for number in range(4):
            batch(hook, made)
            made.validate()
            if number == 0:
                hook.flush()
                gate.opened.clear()
        assert (gate.copies, gate.written) == ([1, 2, 4], ["step-00000001"])
        gate.opened.set()
    assert best_checkpoint(root) == root / "step-00000004"


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="a signal to one thread is POSIX")
def test_an_interrupt_while_a_write_is_waited_for_loses_no_checkpoint(root, strategy, gate, steps):
    """Ctrl-C while a save waits its turn: what was to be written is written, on the record, and found."""

    class Interrupting:
        frequency, stage = 1, TrainingStage.AFTER_BATCH

        def __call__(self, ctx, stage):
            if ctx.step_count == 3:  # the save that is about to wait
                main = threading.main_thread().ident
                threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
                threading.Timer(0.5, gate.opened.set).start()

    hook = CheckpointHook(root=root, every_steps=1, keep=1)
    made = strategy(Interrupting(), hook, num_steps=9)
    gate.opened.clear()
    with pytest.raises(KeyboardInterrupt):
        made.run(BATCHES)
    assert (made.step_count, steps(root)) == (3, [2])
    assert latest_checkpoint(root).name == "step-00000002"
    assert hook.state_dict()["kept"] == ["step-00000002"]


def test_a_copy_that_is_written_is_let_go_of(root, strategy, gate):
    """The memory of a copy is free when it is on the disk, not only when the next one is taken."""
    hook = CheckpointHook(root=root, every_steps=1)
    made = strategy(hook, num_steps=99)
    with hook:
        batch(hook, made)
        deadline = time.monotonic() + 60
        while gate.alive and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (gate.alive, gate.written) == (0, ["step-00000001"])


def test_leaving_the_run_waits_for_the_last_write(root, strategy, gate, steps):
    """When `run` returns, everything that was due is on the disk, although the writer was slow."""
    made = strategy(CheckpointHook(root=root, every_steps=4), num_steps=4)
    gate.open_soon()
    made.run(BATCHES)
    assert steps(root) == [4]
    assert not [one for one in threading.enumerate() if one.name.startswith("checkpoint-writer")]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_interrupted_run_keeps_what_was_being_written(root, strategy, gate, steps, error):
    """Whatever ends a run, the write under way is finished first."""

    class Interrupting:
        frequency, stage = 1, TrainingStage.AFTER_BATCH

        def __call__(self, ctx, stage):
            if ctx.step_count == 3:
                threading.Timer(0.2, gate.opened.set).start()
                raise error

    made = strategy(CheckpointHook(root=root, every_steps=2), Interrupting(), num_steps=9)
    gate.opened.clear()
    with pytest.raises(error):
        made.run(BATCHES)
    assert steps(root) == [2]


def test_synchronous_writing_starts_no_thread(root, strategy, gate):
    """With asynchronous=False the training thread writes, and the checkpoint is there when the save returns."""
    hook = CheckpointHook(root=root, every_steps=1, asynchronous=False)
    made = strategy(hook, num_steps=99)
    with hook:
        batch(hook, made)
        assert latest_checkpoint(root).name == "step-00000001"
    assert gate.threads == {threading.get_ident()}


def test_outside_a_run_a_save_is_complete_when_it_returns(root, strategy, gate):
    """Where nobody enters the hook nobody closes it either, so nothing is left to be done later."""
    made = strategy(CheckpointHook(root=root, every_steps=1), num_steps=99)
    gate.open_soon()
    batch(None, made)
    assert latest_checkpoint(root).name == "step-00000001"


def test_flush_waits_for_the_write(root, strategy, gate):
    """After a flush the checkpoint of a moment ago is on the disk, while the run is still open."""
    hook = CheckpointHook(root=root, every_steps=1)
    made = strategy(hook, num_steps=99)
    with hook:
        gate.open_soon()
        batch(hook, made)
        assert latest_checkpoint(root) is None
        hook.flush()
        assert latest_checkpoint(root).name == "step-00000001"


def test_closing_twice_is_harmless_and_an_unused_hook_leaves_nothing(root):
    """A hook that never ran makes no folder."""
    hook = CheckpointHook(root=root, every_steps=1)
    hook.close()
    hook.close()
    assert not root.exists()


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda hook: pickle.loads(pickle.dumps(hook))])
def test_a_copied_hook_knows_what_the_first_one_kept(root, strategy, clone, steps):
    """Settings and record are copied; threads are not."""
    hook = CheckpointHook(root=root, every_steps=1, keep=2)
    made = strategy(hook, num_steps=3)
    made.run(BATCHES)
    twin = clone(hook)
    assert twin.state_dict() == hook.state_dict()
    with twin:
        twin(TrainContext(step_count=4, workflow=made), TrainingStage.AFTER_BATCH)
    assert steps(root) == [3, 4]


UNCLOSED = """
import sys, torch
from torch import nn
from nvalchemi.training import CheckpointHook, OptimizerConfig, TrainingStrategy
hook = CheckpointHook(root=sys.argv[1], every_steps=1)
run = TrainingStrategy(models=nn.Linear(9, 9), optimizer_configs=OptimizerConfig(), num_steps=2,
    loss_fn=lambda p, b: p.square().mean(), hooks=[hook])
hook.__enter__()
run.train_batch(torch.ones(1, 9))
"""


def test_the_interpreter_does_not_exit_in_the_middle_of_a_write(root, steps):
    """A hook that was never closed still finishes its checkpoint."""
    subprocess.run([sys.executable, "-c", UNCLOSED, str(root)], check=True)
    assert steps(root) == [1]


class Copied(TorchDispatchMode):
    """Adds up the bytes of large tensors that this thread makes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        views = ("detach", "alias", "view")
        if isinstance(made, torch.Tensor) and func._schema.name.removeprefix("aten::") not in views:
            self.bytes += made.nbytes * (made.nbytes > 100_000)
        return made


def test_the_training_thread_makes_one_copy_of_the_state(root, strategy, gate):
    """A save costs the training thread as many bytes as the state has, and no pass more; the writer does the rest."""
    hook = CheckpointHook(root=root, every_steps=1)
    made = strategy(hook, models=torch.nn.Linear(300, 300), num_steps=99)
    made.train_batch(torch.ones(1, 300))
    state = [made.models["main"].weight, *made.optimizers[0].state[made.models["main"].weight].values()]
    with hook:
        made._steps.add(1)
        with Copied() as copied:
            hook(TrainContext(step_count=made.step_count, workflow=made), TrainingStage.AFTER_BATCH)
        hook.flush()
    assert copied.bytes == sum(tensor.nbytes for tensor in state if tensor.nbytes > 100_000) == 3 * 300 * 300 * 4
