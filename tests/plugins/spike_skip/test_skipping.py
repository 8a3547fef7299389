"""Which steps are skipped, what is told of them, and what comes after too many."""

from __future__ import annotations

import contextlib
import logging
import math
import pickle

import pytest
import torch

from nvalchemi.errors import NoProgressError
from nvalchemi.hooks import TrainContext
from nvalchemi.testing import VetoingHook
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import Shared, TrainingUpdateHook, UpdatePriority
from nvalchemi_hooks_spike_skip import SpikeSkipHook

POISONED = {40: 30.0, 70: 1e4, 71: 9.0}


def poisoned(losses):
    """The losses with some of them far out."""
    return [POISONED.get(number, loss) for number, loss in enumerate(losses)]


class ScalesLoss(TrainingUpdateHook):
    """Scales the loss by the scaler in the context, before anybody else sees it."""

    priority = UpdatePriority.SCALE
    reads_grad = False

    def transform_loss(self, ctx, loss):
        return ctx.grad_scaler.scale(loss)


@pytest.mark.parametrize("watch", ["both", "loss", "grad_norm"])
def test_a_poisoned_stream_loses_its_poison_and_nothing_else(stream, noisy, watch):
    """Of a hundred noisy batches exactly the poisoned ones are skipped, whatever is watched."""
    hook = SpikeSkipHook(watch=watch, window=32)
    assert stream(hook).skipped(poisoned(noisy(100))) == [40, 70, 71]
    assert {skip.batch for skip in hook.skips} == {40, 70, 71}
    assert (hook.total_skips, hook.consecutive_skips) == (3, 0)


def test_each_of_the_two_is_enough(stream, noisy):
    """A loss that stands out with a usual gradient is skipped, and so is a gradient with a usual loss."""
    hook = SpikeSkipHook(window=16)
    run = stream(hook)
    run.skipped(noisy(16))
    assert run.batch(50.0, 1.0)
    assert run.batch(1.0, 50.0)
    assert not run.batch(1.0, 1.0)
    assert [skip.watched for skip in hook.skips] == ["loss", "grad_norm"]


def test_a_loss_that_is_unusually_small_is_no_spike(stream, noisy):
    """The test is one-sided: a step that goes far down is taken."""
    run = stream(SpikeSkipHook(window=16))
    assert run.skipped([*noisy(16), 1e-6, 1e-3]) == []


def test_before_the_warm_up_is_over_only_what_is_not_finite_is_skipped(stream, noisy):
    """The first `warmup` executed steps are taken whatever their size; inf and nan never are."""
    losses = [1.0, 99.0, math.nan, 1.0, math.inf, 1.0, 99.0, 1.0]
    assert stream(SpikeSkipHook(window=8, warmup=4)).skipped(losses) == [2, 4, 6]
    assert stream(SpikeSkipHook(window=16, warmup=16)).skipped(losses) == [2, 4]


def test_what_was_skipped_leaves_no_trace_in_the_statistic(stream, noisy):
    """With and without the poison, or with another hook's vetoes, the values of the statistic are the same."""
    clean, hook, other = (SpikeSkipHook(window=32) for _ in range(3))
    losses = noisy(60)
    stream(clean).skipped(losses)
    stream(hook).skipped([loss for number, loss in enumerate(losses) for loss in [loss] + [1e3] * (number in (30, 45))])
    assert hook.state_dict()["histories"] == clean.state_dict()["histories"]
    stream(other, VetoingHook(0)).skipped([1e3, *losses])
    assert other.state_dict()["histories"] == clean.state_dict()["histories"]


def test_after_too_many_in_a_row_the_new_level_is_learnt(stream, noisy, caplog):
    """A loss that stays ten times higher costs max_consecutive_skips steps, and is normal from then on."""
    hook = SpikeSkipHook(window=32, warmup=8, max_consecutive_skips=3)
    higher = [10 * loss for loss in noisy(40, seed=1)]
    with caplog.at_level(logging.WARNING, logger="nvalchemi.hooks.spike_skip"):
        assert stream(hook).skipped([*noisy(20), *higher, 1e3, *higher]) == [20, 21, 22, 60]
    assert (hook.restarts, hook.total_skips, hook.consecutive_skips) == (1, 4, 0)
    assert "3 spikes in a row (max_consecutive_skips=3)" in caplog.text
    assert "the statistic was forgotten 1 times" in hook.summary()


def test_or_the_run_stops(stream, noisy):
    """With on_limit="stop" the last of the row raises, naming the number, the value and the remedy."""
    run = stream(SpikeSkipHook(window=8, max_consecutive_skips=2, on_limit="stop"))
    run.skipped(noisy(8))
    assert run.batch(50.0)
    with pytest.raises(NoProgressError, match=r"2 spikes in a row .* 60, above .*on_limit='restart'"):
        run.batch(60.0)


def test_without_a_cap_it_goes_on_skipping(stream, noisy):
    """max_consecutive_skips=None never forgets."""
    hook = SpikeSkipHook(window=8, max_consecutive_skips=None)
    run = stream(hook)
    run.skipped(noisy(8))
    assert run.skipped([50.0] * 60) == list(range(60))
    assert hook.consecutive_skips == 60


def test_what_is_not_finite_is_never_taken(stream, noisy):
    """inf and nan are skipped in however long a row, and neither make up a row nor end one."""
    hook = SpikeSkipHook(window=8, max_consecutive_skips=2)
    run = stream(hook)
    run.skipped(noisy(8))
    assert run.skipped([50.0, *[math.inf, -math.inf, math.nan] * 3]) == list(range(10))
    assert (hook.consecutive_skips, hook.restarts, hook.total_skips) == (1, 0, 10)
    run = stream(SpikeSkipHook(watch="loss"))
    assert [run.batch(loss, 1.0) for loss in (-math.inf, math.nan, math.inf, 1.0)] == [True, True, True, False]


def test_the_report_says_step_value_and_limit(stream, noisy, caplog):
    """Each skip is a line with its step, value and limit, in the log on rank 0 and in the summary."""
    hook = SpikeSkipHook(watch="loss", window=16, max_consecutive_skips=None)
    run = stream(hook)
    with caplog.at_level(logging.WARNING, logger="nvalchemi.hooks.spike_skip"):
        run.skipped([*noisy(20), 50.0])
    (skip,) = hook.skips
    assert (skip.step, skip.batch, skip.watched, skip.value) == (20, 20, "loss", 50.0)
    assert 1.1 < skip.limit < 3.0
    assert skip.median == pytest.approx(1.0, abs=0.1)
    assert f"skipped step 20 (epoch 0, batch 20): loss 50, above {skip.limit:.4g}" in caplog.text
    assert hook.summary() == f"1 steps skipped\n{skip}"
    run.skipped([50.0] * 300)
    assert (hook.total_skips, len(hook.skips)) == (301, 100)


def test_only_the_first_rank_says_so(caplog):
    """Another rank counts, and logs nothing."""
    hook = SpikeSkipHook()
    hook._tell(TrainContext(global_rank=1), "a line")
    assert not caplog.records
    hook._tell(TrainContext(global_rank=0), "a line")
    assert len(caplog.records) == 1


def test_a_loss_of_any_sign(stream):
    """With signed_loss=True losses around zero are judged by themselves."""
    losses = [-1.0, 0.1, 0.0, -0.2, 0.3, -0.4, 0.2, -0.1, 40.0, 0.2, -9.0]
    hook = SpikeSkipHook(watch="loss", window=8, signed_loss=True)
    assert stream(hook).skipped(losses) == [8]


def test_a_loss_below_zero_goes_unwatched_and_says_so_once(stream, noisy, caplog):
    """By logarithms a loss of 0 or below is neither judged nor kept; one line in the log names signed_loss."""
    hook = SpikeSkipHook(watch="loss", window=8)
    run = stream(hook)
    with caplog.at_level(logging.WARNING, logger="nvalchemi.hooks.spike_skip"):
        assert run.skipped([*noisy(8), -1.0, 0.0, -2.0, 1.0, 50.0]) == [12]
    assert caplog.text.count("use signed_loss=True") == 1
    assert len(hook.state_dict()["histories"]["loss"]) == 8


def test_a_window_of_several_batches_has_their_mean_loss(stream, noisy):
    """Under accumulation the mean over the window's batches counts, once a window."""
    hook = SpikeSkipHook(watch="loss", window=8, warmup=8)
    run = stream(hook)
    for loss in noisy(8):
        run.batch(loss - 0.5, complete=False)
        run.batch(loss + 0.5)
    assert hook.state_dict()["histories"]["loss"] == pytest.approx(noisy(8), rel=1e-6)
    run.batch(1.0, complete=False)
    assert hook.state_dict()["open_batches"] == 1
    assert run.batch(50.0)
    assert hook.skips[0].value == pytest.approx(25.5)
    assert hook.state_dict()["open_loss"] == hook.state_dict()["open_batches"] == 0


def test_over_several_ranks_their_mean_loss_counts(stream, monkeypatch):
    """What is judged and kept is the mean of what all ranks have shared, one number a window."""
    shared, inner = [], Shared.settle

    def settle(one, *args):
        shared.append(one)
        inner(one, one.value + 3.0, 2)  # as if another rank had a loss of 3

    monkeypatch.setattr(Shared, "settle", settle)
    hook = SpikeSkipHook(window=8)
    run = stream(hook)
    run.batch(1.5, complete=False)
    run.batch(0.5)
    assert len(shared) == 1
    assert hook.state_dict()["histories"]["loss"] == [2.0]


def test_under_a_loss_scale_the_loss_is_the_raw_one(stream, noisy):
    """A loss scale changes neither what is kept nor what is skipped, and a spike does not change the scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled, plain = SpikeSkipHook(window=16), SpikeSkipHook(window=16)
    losses = [*noisy(20), 50.0, 1.0]
    assert stream(scaled, ScalesLoss(), scaler=scaler).skipped(losses) == stream(plain).skipped(losses) == [20]
    assert scaler.get_scale() == 1024.0
    assert scaled.state_dict() == plain.state_dict()


@pytest.mark.parametrize("cut", [1, 25, 41, 72])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_resumed_run_is_the_same(stream, noisy, cut, lazy):
    """Saved at any batch and loaded into a new hook: the same skips, weights and state, bit for bit."""
    losses = poisoned(noisy(90))
    hook = SpikeSkipHook(window=32)
    straight = stream(hook, lazy=lazy)
    expected = straight.skipped(losses)
    first = stream(SpikeSkipHook(window=32), lazy=lazy)
    skipped = first.skipped(losses[:cut])
    state = pickle.loads(pickle.dumps(first.update.state_dict()))
    second = stream(SpikeSkipHook(window=32), lazy=lazy)
    second.update.load_state_dict(state)
    second.steps, second.batches = first.steps, cut
    second.weight.data.copy_(first.weight.data)
    skipped += [cut + number for number in second.skipped(losses[cut:])]
    assert skipped == expected
    assert torch.equal(second.weight, straight.weight)
    assert second.update.state_dict() == straight.update.state_dict()


def test_a_resume_in_the_middle_of_a_window_keeps_its_losses(stream):
    """The losses of an open window are in the state: the mean after a resume is that of the whole window."""
    hook, resumed = (SpikeSkipHook(watch="loss") for _ in range(2))
    run = stream(hook)
    run.batch(0.1, complete=False)
    run.batch(0.2, complete=False)
    resumed.load_state_dict(hook.state_dict())
    stream(resumed).batch(0.3)
    run.batch(0.3)
    assert resumed.state_dict() == hook.state_dict()
    assert hook.state_dict()["histories"]["loss"] == pytest.approx([0.2])


def test_states_that_do_not_belong_are_refused():
    """A state of something else, or of a hook that watches something else, is a ValueError and changes nothing."""
    hook = SpikeSkipHook(watch="loss")
    before = hook.state_dict()
    for bad in ({}, {**before, "total_skips": True}, {**before, "x": 0}):
        with pytest.raises(ValueError, match="give what state_dict returns"):
            hook.load_state_dict(bad)
    with pytest.raises(ValueError, match="give the same watch"):
        hook.load_state_dict(SpikeSkipHook().state_dict())
    assert hook.state_dict() == before


def test_a_shorter_window_takes_the_latest_values(stream, noisy):
    """Settings are free to change over a resume: of a longer history the latest values are taken."""
    hook, shorter = SpikeSkipHook(watch="loss", window=16), SpikeSkipHook(watch="loss", window=4)
    stream(hook).skipped(noisy(16))
    shorter.load_state_dict(hook.state_dict())
    assert shorter.state_dict()["histories"]["loss"] == hook.state_dict()["histories"]["loss"][-4:]


def test_lazy_and_eager_are_the_same(stream, noisy):
    """Left on the device, the veto skips the same steps, and the state ends the same."""
    runs = []
    for lazy in (False, True):
        run = stream(SpikeSkipHook(window=32), lazy=lazy)
        for loss in poisoned(noisy(90)):  # unlike `skipped` this asks for nothing
            with TrainContext(optimizers=run.optimizers, batch_count=run.batches) as ctx:
                run.update(ctx, TrainingStage.BEFORE_BATCH)
                ctx.loss = (run.weight * loss).sum() + loss
                for stage in (TrainingStage.DO_BACKWARD, TrainingStage.DO_OPTIMIZER_STEP):
                    run.update(ctx, stage)
                run.update(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
                run.batches += 1
        runs.append((run.update.state_dict(), run.update.last_outcome.resolution, run.weight.item()))
    (eager, at_once, weight), (lazily, later, other) = runs
    assert eager == lazily
    assert weight == other
    assert (at_once, later) == ("before the step", "lazily, after the step")


@pytest.mark.parametrize("before_backward", [True, False])
def test_an_error_inside_a_window_takes_its_losses_along(stream, before_backward):
    """Losses of a window that an error has ended are in no mean: the statistic is that of the window after it."""
    hook = SpikeSkipHook(watch="loss", warmup=4, window=4)
    steps = stream(hook)
    steps.batch(100.0, complete=False)
    with contextlib.suppress(OSError), TrainContext(optimizers=steps.optimizers) as ctx:
        steps.update(ctx, TrainingStage.BEFORE_BATCH)
        if not before_backward:
            ctx.loss = 50.0 * steps.weight.sum()
            steps.update(ctx, TrainingStage.DO_BACKWARD)
        raise OSError
    steps.batch(1.0, complete=False)
    steps.batch(3.0)
    assert hook.state_dict()["histories"] == {"loss": [2.0]}
