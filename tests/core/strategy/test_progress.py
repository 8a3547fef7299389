"""The progress bar: where a person looks, and nowhere else."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from nvalchemi.training import TrainingStage
from nvalchemi.training.progress import RunProgress

S = TrainingStage


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Make standard error a terminal as wide as a usual one; called in the test, as pytest puts its own there."""

    def look():
        stream = Terminal()
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    return look


def refreshing():
    return [thread for thread in threading.enumerate() if "Refresh" in type(thread).__name__]


def test_nothing_is_written_where_nobody_looks(make_strategy, batches, capfd):
    """When standard error is no terminal, a run writes nothing anywhere."""
    make_strategy(progress=None, num_epochs=3).run(batches)
    assert capfd.readouterr() == ("", "")


def test_the_bar_is_shown_on_a_terminal(make_strategy, batches, terminal, capfd):
    """On a terminal the bar shows epoch, batches done of all, and the loss, on standard error alone."""
    stream = terminal()
    make_strategy(progress=None, num_epochs=3).run(batches)
    text = stream.getvalue()
    assert "epoch 3" in text
    assert "12/12" in text
    assert "loss" in text
    assert capfd.readouterr().out == ""


def test_the_bar_counts_steps_where_steps_are_the_goal(make_strategy, veto, batches, terminal):
    """With `num_steps` the bar counts executed steps."""
    stream = terminal()
    make_strategy(veto(1), progress=None, num_steps=5).run(batches)
    assert "5/5" in stream.getvalue()


@pytest.mark.usefixtures("capfd")
def test_progress_false_shows_nothing_on_a_terminal(make_strategy, batches, terminal):
    """`progress=False` shows nothing on a terminal either."""
    stream = terminal()
    make_strategy(progress=False).run(batches)
    assert stream.getvalue() == ""


def test_the_bar_is_stopped_by_an_interruption(make_strategy, plain, batches, terminal):
    """After a Ctrl-C the bar no longer refreshes, the cursor is shown again, and the streams are as they were."""

    def interrupt(ctx, stage):
        assert refreshing()
        raise KeyboardInterrupt

    stream = terminal()
    out, err = sys.stdout, sys.stderr
    with pytest.raises(KeyboardInterrupt):
        make_strategy(plain(interrupt, S.AFTER_LOSS), progress=None).run(batches)
    for thread in refreshing():
        thread.join(timeout=5)
    assert refreshing() == []
    assert stream.getvalue().rstrip("\n").endswith("\x1b[?25h")
    assert (sys.stdout, sys.stderr) == (out, err)


def test_looking_reads_the_loss_now_and_then_only(terminal):
    """The loss is read from the device when it is shown, twice a second at most, not at every batch."""
    reads = []

    class Loss:
        def __float__(self):
            reads.append(1)
            return 0.5

    class Context:
        epoch = 0
        loss = Loss()

    terminal()
    with RunProgress(1000, 0, None) as progress:
        for done in range(1000):
            progress.advance(Context(), lambda done=done: done)
    assert 1 <= len(reads) <= 4


def test_a_hook_may_print_while_the_bar_is_shown(make_strategy, plain, batches, terminal, capsys):
    """What a hook prints during a run arrives, bar or not."""
    stream = terminal()
    make_strategy(plain(lambda ctx, stage: print("from the hook"), S.AFTER_BATCH), progress=None).run(batches)
    assert (stream.getvalue() + capsys.readouterr().out).count("from the hook") == 4
