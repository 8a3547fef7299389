"""Knowing which batch is the last of its pass, for hooks that ask."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook

S = TrainingStage


class Asks(TrainingUpdateHook):
    """Writes down what it is told of each batch."""

    reads_grad = False
    looks_ahead = True

    def __init__(self):
        self.told = []

    def before_batch(self, ctx, *, will_skip):
        self.told.append(ctx.is_last_batch)
        return True


class Counted:
    """A loader without a length that counts how many batches were fetched."""

    def __init__(self, batches):
        self.batches, self.fetched = batches, 0

    def __iter__(self):
        for batch in self.batches:
            self.fetched += 1
            yield batch


def test_the_last_batch_is_known_without_a_length(make_strategy, batches):
    """A hook that asks is told of every batch whether it is the last of its pass, for loaders of any kind."""
    asks = Asks()
    make_strategy(asks, num_epochs=2).run(Counted(batches))
    assert asks.told == 2 * [False, False, False, True]


def test_a_pass_of_one_batch_is_its_last(make_strategy, batches):
    """The first batch may be the last one."""
    asks = Asks()
    make_strategy(asks, num_steps=2).run(Counted(batches[:1]))
    assert asks.told == [True, True]


@pytest.mark.parametrize("asked", [False, True])
def test_no_batch_is_fetched_ahead_unless_a_hook_asks(make_strategy, batches, plain, asked):
    """Where nobody looks ahead the next batch is fetched when its turn comes, and no batch is called the last."""
    loader, seen = Counted(batches), []
    see = plain(lambda ctx, stage: seen.append((loader.fetched, ctx.is_last_batch)), S.AFTER_BATCH)
    see.looks_ahead = asked
    make_strategy(see).run(loader)
    ahead = [(2, False), (3, False), (4, False), (4, True)]
    assert seen == (ahead if asked else [(1, False), (2, False), (3, False), (4, False)])


def test_another_run_begins_the_pass_anew(make_strategy, batches, plain):
    """A batch that waited when a run ended is not carried into the next run, which may have another loader."""
    seen = []
    see = plain(lambda ctx, stage: seen.append(float(ctx.batch[0].sum())), S.AFTER_BATCH)
    strategy = make_strategy(see, Asks(), num_steps=1)
    strategy.run(Counted(batches))
    strategy.run(Counted(batches[2:]))
    assert seen == [float(batches[0][0].sum()), float(batches[2][0].sum())]


def test_a_batch_of_ones_own_can_be_the_last(make_strategy, batches):
    """In a loop of one's own train_batch is told."""
    asks = Asks()
    strategy = make_strategy(asks)
    strategy.train_batch(batches[0])
    strategy.train_batch(batches[1], is_last_batch=True)
    assert asks.told == [False, True]


def test_one_batch_is_kept_ahead_and_no_more(make_strategy):
    """While a batch is trained on, it and the one that waits are there; those before it are not."""
    alive, most = weakref.WeakSet(), []

    class Batch:
        def __init__(self):
            self.x = torch.ones(3, 2)

        def to(self, device):
            return self

    class Loader:
        def __iter__(self):
            for _ in range(4):
                batch = Batch()
                alive.add(batch)
                gc.collect()
                most.append(len(alive))
                yield batch
                del batch

    strategy = make_strategy(
        Asks(), training_fn=lambda model, batch: model(batch.x), loss_fn=lambda predictions, batch: predictions.mean()
    )
    strategy.run(Loader())
    assert most == [1, 2, 2, 2]


def test_a_loader_that_fails_ahead_fails_the_run_and_the_next_run_is_whole(make_strategy, batches):
    """An error in the batch that would wait is raised as it is; afterwards a run trains on every batch again."""

    class Failing:
        ill = True

        def __iter__(self):
            yield from batches[:2]
            if self.ill:
                raise OSError("the disk is gone")
            yield from batches[2:]

    asks, loader = Asks(), Failing()
    strategy = make_strategy(asks)
    with pytest.raises(OSError, match="the disk is gone"):
        strategy.run(loader)
    loader.ill = False
    asks.told.clear()
    strategy.run(loader)
    assert asks.told == [False, False, False, True]
