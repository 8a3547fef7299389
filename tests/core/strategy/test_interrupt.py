"""Ctrl-C, or any error, in the middle of a batch: everything is closed, and the traceback is the user's."""

from __future__ import annotations

import sys
import threading
import traceback

import pytest
import torch
from torch import nn

from nvalchemi.training import TrainingStage, Validation
from nvalchemi.training.hooks import TrainingUpdateHook

S = TrainingStage
PLACES = ["forward", "loss", "loader", "plain hook", "update hook", "backward", "validation"]


def users_own(error):
    """Stand in for the user's code at the innermost place."""
    raise error


class Interrupted:
    """A strategy with a frozen model, autocast and a bar, in which one place raises at the second batch, once."""

    def __init__(self, place, error, make_strategy, plain, managed, batches):
        self.place, self.error, self.batches = place, error, batches
        self.armed = True
        self.log = []
        self.closed = []
        teacher = nn.Sequential(nn.Linear(2, 1), nn.Dropout())
        self.models = {"main": nn.Linear(2, 1), "teacher": teacher}
        self.models["main"].eval()
        hooks = [
            managed(self.log),
            plain(self.open_autocast, S.BEFORE_FORWARD),
            plain(lambda ctx, stage: self.fail("plain hook", ctx.batch_count), S.AFTER_OPTIMIZER_STEP),
            self.update_hook(),
        ]
        self.strategy = make_strategy(
            *hooks,
            models=self.models,
            training_fn=self.forward,
            loss_fn=self.loss,
            num_epochs=2,
            progress=True,
            validation=Validation(loader=batches, every_steps=2),
        )

    def fail(self, place, batch_count):
        if self.armed and place == self.place and batch_count == 1:
            self.armed = False
            users_own(self.error)

    def open_autocast(self, ctx, stage):
        ctx.enter_batch_context(torch.autocast("cpu", torch.bfloat16))

    def forward(self, models, batch):
        if not torch.is_grad_enabled():
            self.fail("validation", 1)
        self.fail("forward", self.strategy.batch_count)
        predictions = models["main"](batch[0])
        if self.armed and self.place == "backward" and self.strategy.batch_count == 1:
            predictions.register_hook(lambda grad: self.fail("backward", 1))
        return predictions.float()

    def loss(self, predictions, batch):
        self.fail("loss", self.strategy.batch_count)
        return (predictions - batch[1]).square().mean()

    def loader(self):
        test = self

        class Loader:
            def __len__(self):
                return len(test.batches)

            def __iter__(self):
                for batch in test.batches:
                    yield batch
                    test.fail("loader", test.strategy.batch_count)

        return Loader()

    def update_hook(self):
        test = self

        class Failing(TrainingUpdateHook):
            def before_optimizer_step(self, ctx, *, will_skip):
                test.fail("update hook", ctx.batch_count)
                return True

        return Failing()

    def modes(self):
        return [
            (module.training, [p.requires_grad for p in module.parameters()])
            for model in self.models.values()
            for module in model.modules()
        ]


@pytest.fixture(params=[KeyboardInterrupt, RuntimeError])
def error(request):
    """What is raised: what Ctrl-C raises, or an error of the user's own."""
    return request.param("stop")


@pytest.fixture(params=PLACES)
def interrupted(request, error, make_strategy, plain, managed, batches):
    """A run that is going to be interrupted."""
    return Interrupted(request.param, error, make_strategy, plain, managed, batches)


def stop(interrupted):
    with pytest.raises(type(interrupted.error)) as info:
        interrupted.strategy.run(interrupted.loader())
    return info.value


@pytest.mark.usefixtures("capsys")
def test_an_interrupted_run_leaves_nothing_open(interrupted):
    """Autocast is off, the bar is stopped, hooks are left with the error, and gradients are enabled."""
    threads, streams = set(threading.enumerate()), (sys.stdout, sys.stderr)
    error = stop(interrupted)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=5)  # the bar's own thread ends by itself once the bar is stopped
        assert not thread.is_alive()
    assert (sys.stdout, sys.stderr) == streams
    assert interrupted.log == ["enter hook", f"exit hook {type(error).__name__}"]


@pytest.mark.usefixtures("capsys")
def test_an_interrupted_run_gives_modes_back(interrupted):
    """Train and eval modes, and who requires gradients, are as they were before the run."""
    before = interrupted.modes()
    stop(interrupted)
    assert interrupted.modes() == before


@pytest.mark.usefixtures("capsys")
def test_the_traceback_of_an_interrupted_run_is_the_users(interrupted):
    """What is raised is the very exception, and its innermost frame is the user's function."""
    raised = stop(interrupted)
    assert raised is interrupted.error
    assert traceback.extract_tb(raised.__traceback__)[-1].name == "users_own"
    assert raised.__cause__ is None
    assert raised.__context__ is None


@pytest.mark.usefixtures("capsys")
def test_the_next_run_finishes_what_was_interrupted(interrupted):
    """The next run trains until the goal of the interrupted one, with the optimizers of before."""
    stop(interrupted)
    strategy = interrupted.strategy
    optimizers = list(strategy.optimizers)
    assert strategy.epoch == 0
    strategy.run(interrupted.loader())
    assert strategy.epoch == 2
    assert [id(o) for o in strategy.optimizers] == [id(o) for o in optimizers]
    assert interrupted.log[2:] == ["enter hook", "exit hook None"]


@pytest.mark.usefixtures("capsys")
def test_the_batch_after_an_interruption_starts_afresh(make_strategy, batches):
    """Gradients of the interrupted batch do not leak: going on equals a run that never saw that batch."""

    class FailOnce(TrainingUpdateHook):
        armed = True

        def before_optimizer_step(self, ctx, *, will_skip):
            if self.armed and ctx.batch_count == 2:
                FailOnce.armed = False
                raise KeyboardInterrupt
            return True

    torch.manual_seed(3)
    stopped = make_strategy(FailOnce(), models=nn.Linear(2, 1))
    torch.manual_seed(3)
    straight = make_strategy(models=nn.Linear(2, 1))
    with pytest.raises(KeyboardInterrupt):
        stopped.run(batches)
    stopped.train_batch(batches[3])
    for batch in (batches[0], batches[1], batches[3]):
        straight.train_batch(batch)
    for a, b in zip(stopped.models["main"].parameters(), straight.models["main"].parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_file_that_a_hook_holds_is_closed(make_strategy, plain, batches, tmp_path):
    """A hook that opens a file when it is entered, and one that has `close` alone, close it after a Ctrl-C."""

    class Writer(plain):
        def __init__(self, path):
            super().__init__(lambda ctx, stage: self.file.write("batch\n"), S.AFTER_BATCH)
            self.path = path

        def __enter__(self):
            self.file = self.path.open("w")

        def __exit__(self, kind, error, traceback):
            self.file.close()

    class Closable(plain):
        def close(self):
            self.file.close()

    def interrupt(ctx, stage):
        if ctx.batch_count == 3:
            raise KeyboardInterrupt

    writer, closable = Writer(tmp_path / "a.txt"), Closable(lambda ctx, stage: None, S.AFTER_BATCH)
    closable.file = (tmp_path / "b.txt").open("w")
    with pytest.raises(KeyboardInterrupt):
        make_strategy(writer, closable, plain(interrupt, S.AFTER_BATCH)).run(batches)
    assert writer.file.closed
    assert closable.file.closed
    assert (tmp_path / "a.txt").read_text() == "batch\n" * 3


def test_errors_of_cleaning_up_are_notes_on_the_users_error(make_strategy, plain, managed, batches):
    """A hook that fails to exit, or a context that fails to close, becomes a note; the user's error is raised."""

    class Broken(managed):
        def __exit__(self, kind, error, traceback):
            raise OSError("disk full")

    class BrokenContext:
        def __enter__(self):
            return self

        def __exit__(self, kind, error, traceback):
            raise OSError("context broken")

    def interrupt(ctx, stage):
        ctx.enter_batch_context(BrokenContext())
        raise KeyboardInterrupt("mine")

    log = []
    strategy = make_strategy(managed(log, "outer"), Broken(log, "broken"), plain(interrupt, S.AFTER_FORWARD))
    with pytest.raises(KeyboardInterrupt, match="mine") as info:
        strategy.run(batches)
    notes = "\n".join(info.value.__notes__)
    assert "disk full" in notes
    assert "context broken" in notes
    assert log == ["enter outer", "enter broken", "exit outer KeyboardInterrupt"]
