"""What is counted, when it is counted, and what hooks with a frequency make of it."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.training import TrainingStage, Validation
from nvalchemi.training.hooks import TrainingUpdateHook

S = TrainingStage


def test_counters_of_a_run_with_vetoes(make_strategy, plain, veto, batches):
    """Batch counters grow with every batch, step counters only where an optimizer stepped."""
    rows = []

    def note(ctx, stage):
        rows.append((ctx.batch_count, ctx.epoch_step_count, ctx.step_count, ctx.global_step_count, ctx.epoch))

    strategy = make_strategy(plain(note, S.AFTER_BATCH), veto(1, 6), num_epochs=2)
    strategy.run(batches)
    assert rows == [
        (1, 1, 1, 1, 0),
        (2, 2, 1, 1, 0),
        (3, 3, 2, 2, 0),
        (4, 4, 3, 3, 0),
        (5, 1, 4, 4, 1),
        (6, 2, 5, 5, 1),
        (7, 3, 5, 5, 1),
        (8, 4, 6, 6, 1),
    ]
    assert (strategy.step_count, strategy.global_step_count) == (6, 6)
    assert (strategy.batch_count, strategy.epoch_step_count, strategy.epoch) == (8, 4, 2)


def test_step_count_grows_after_after_optimizer_step_and_before_after_batch(make_strategy, plain, veto, batches):
    """`step_count` grows after AFTER_OPTIMIZER_STEP and before AFTER_BATCH; a skipped step leaves it alone."""
    rows = []
    stages = (S.BEFORE_BATCH, S.AFTER_OPTIMIZER_STEP, S.AFTER_BATCH)
    spy = plain(lambda ctx, stage: rows.append((stage.name, ctx.step_count, ctx.batch_count)), *stages)
    make_strategy(spy, veto(1)).run(batches[:3])
    assert rows == [
        ("BEFORE_BATCH", 0, 0),
        ("AFTER_OPTIMIZER_STEP", 0, 0),
        ("AFTER_BATCH", 1, 1),
        ("BEFORE_BATCH", 1, 1),
        ("AFTER_OPTIMIZER_STEP", 1, 1),
        ("AFTER_BATCH", 1, 2),
        ("BEFORE_BATCH", 1, 2),
        ("AFTER_OPTIMIZER_STEP", 1, 2),
        ("AFTER_BATCH", 2, 3),
    ]


def test_counters_between_batches(make_strategy, plain, batches):
    """BEFORE_EPOCH has the number of its epoch and zero batches in it; AFTER_EPOCH still has that number."""
    rows = []
    stages = (S.BEFORE_TRAINING, S.BEFORE_EPOCH, S.AFTER_EPOCH, S.AFTER_TRAINING)
    spy = plain(lambda ctx, stage: rows.append((stage.name, ctx.epoch, ctx.epoch_step_count, ctx.step_count)), *stages)
    make_strategy(spy, num_epochs=2).run(batches)
    assert rows == [
        ("BEFORE_TRAINING", 0, 0, 0),
        ("BEFORE_EPOCH", 0, 0, 0),
        ("AFTER_EPOCH", 0, 4, 4),
        ("BEFORE_EPOCH", 1, 0, 4),
        ("AFTER_EPOCH", 1, 4, 8),
        ("AFTER_TRAINING", 2, 4, 8),
    ]


def test_a_batch_without_any_gradient_takes_no_step(make_strategy, plain, batches, square_error):
    """A batch in which no optimizer has a gradient counts as a batch and not as a step."""
    unused = torch.zeros((), requires_grad=True)

    def loss_fn(predictions, batch):
        return square_error(predictions, batch) if batch[1] is not batches[1][1] else unused * 1.0

    strategy = make_strategy(loss_fn=loss_fn)
    strategy.run(batches)
    assert (strategy.step_count, strategy.batch_count) == (3, 4)


def test_a_window_of_several_batches_is_one_step(make_strategy, batches):
    """Batches of a window that is not complete are counted as batches, and the window as one step."""

    class Accumulate(TrainingUpdateHook):
        priority = 10
        reads_grad = False

        def before_batch(self, ctx, *, will_skip):
            ctx.window_complete = ctx.batch_count % 2 == 1
            return ctx.batch_count % 2 == 0

    strategy = make_strategy(Accumulate(), num_steps=3)
    strategy.run(batches)
    assert (strategy.step_count, strategy.batch_count) == (3, 6)


@pytest.mark.parametrize(
    ("frequency", "expected"),
    [
        (1, [0, 1, 1, 1, 2, 3, 3, 4]),
        (2, [0, 2, 4]),
        (3, [0, 3]),
    ],
)
def test_frequency_counts_steps_once_a_value(make_strategy, plain, veto, batches, frequency, expected):
    """`frequency = n` runs when `step_count % n == 0`, once per value, also when skipped batches share it."""
    seen = []
    spy = plain(lambda ctx, stage: seen.append(ctx.step_count), S.BEFORE_BATCH, frequency=frequency)
    make_strategy(spy, veto(1, 2, 5), num_epochs=2).run(batches)
    assert seen == expected


def test_frequency_counts_each_stage_for_itself(make_strategy, plain, veto, batches):
    """A hook of two stages runs once per value of `step_count` at each of them."""
    seen = []
    spy = plain(
        lambda ctx, stage: seen.append((stage.name, ctx.step_count)), S.BEFORE_BATCH, S.AFTER_BATCH, frequency=2
    )
    make_strategy(spy, veto(1)).run(batches)
    assert seen == [("BEFORE_BATCH", 0), ("AFTER_BATCH", 2), ("BEFORE_BATCH", 2)]


def test_a_skipped_batch_does_not_validate_again(make_strategy, plain, veto, batches):
    """A skipped batch does not trigger the validation that its unchanged step number has had already."""
    calls = []
    spy = plain(lambda ctx, stage: calls.append((ctx.step_count, ctx.batch_count)), S.AFTER_VALIDATION)
    strategy = make_strategy(spy, veto(2), validation=Validation(loader=batches, every_steps=2))
    strategy.run(batches)
    assert calls == [(2, 2)]


def test_train_batch_counts_as_a_run_does(make_strategy, veto, batches):
    """`train_batch` outside of a run moves the same counters, and its context holds them."""
    strategy = make_strategy(veto(1))
    first, second = (strategy.train_batch(batch) for batch in batches[:2])
    assert (first.step_count, first.batch_count, first.step_skipped) == (1, 1, False)
    assert (second.step_count, second.batch_count, second.step_skipped) == (1, 2, True)
    assert (strategy.step_count, strategy.batch_count, strategy.epoch_step_count) == (1, 2, 2)


@pytest.fixture
def four_ranks():
    """Make this process number 1 of 4, without the others: collectives give back what was put in."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    distributed.destroy_process_group()


def test_global_step_count_grows_by_the_number_of_ranks(make_strategy, four_ranks, veto, batches):
    """`global_step_count` grows by the number of ranks with every executed step; the rank is in the context."""
    strategy = make_strategy(veto(1), devices=["meta", "cpu", "meta", "meta"])
    strategy.run(batches)
    ctx = strategy.train_batch(batches[0])
    assert (strategy.step_count, strategy.global_step_count) == (4, 16)
    assert (ctx.global_rank, ctx.global_step_count) == (1, 16)


def test_of_several_devices_each_rank_takes_its_own(make_strategy, four_ranks, batches):
    """Of several devices each rank takes the one at its number."""
    strategy = make_strategy(devices=["meta", "cpu"])
    ctx = strategy.train_batch(batches[0])
    assert ctx.device.type == "cpu"
