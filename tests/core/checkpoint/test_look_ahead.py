"""A run that fetches one batch ahead resumes as exactly as one that does not."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from nvalchemi.errors import CheckpointMismatchError
from nvalchemi.training import TrainingStage, load_training, save_training
from nvalchemi.training.hooks import TrainingUpdateHook

S = TrainingStage


class CloseAtLast(TrainingUpdateHook):
    """One step for every two batches, and one for what is left at the end of a pass."""

    priority = 10
    looks_ahead = True

    def __init__(self):
        self.open = 0

    def before_batch(self, ctx, *, will_skip):
        begun, self.open = self.open, (self.open + 1) % 2 if not ctx.is_last_batch else 0
        ctx.window_complete = self.open == 0
        return begun == 0

    def state_dict(self):
        return {"open": self.open}

    def load_state_dict(self, state):
        self.open = state["open"]


class Noisy(Dataset):
    """Draws from every generator when an item is asked for."""

    def __len__(self):
        return 20

    def __getitem__(self, place):
        x = torch.full((6,), float(place)) / 20 + torch.rand(6) + random.random() + numpy.random.random()
        return x, x.sum(0, keepdim=True).sin()


class NoisyStream(IterableDataset):
    """The same without a length."""

    def __iter__(self):
        return (Noisy()[place] for place in range(20))


class Stream:
    """A loader that keeps its place itself, without a length; each batch draws from every generator."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        while self.place < 5:
            self.place += 1
            x = torch.stack([Noisy()[4 * self.place][0] for _ in range(4)])
            yield x, x.sum(1, keepdim=True)
        self.place = 0

    def state_dict(self):
        torch.rand(3)  # it may draw what it likes
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def _shuffled(own_seed):
    return DataLoader(Noisy(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))


def _drawing_from_its_own(own_seed):
    generator = torch.Generator().manual_seed(3)
    sampler = torch.utils.data.RandomSampler(Noisy(), replacement=True, num_samples=20, generator=generator)
    return DataLoader(Noisy(), batch_size=4, sampler=sampler)


LOADERS = {
    "drawn in the main process": lambda own_seed: DataLoader(Noisy(), batch_size=4, shuffle=True),
    "a generator of its own": _shuffled,
    "drawn one by one": _drawing_from_its_own,
    "no length": lambda own_seed: DataLoader(NoisyStream(), batch_size=4),
    "keeps its place": lambda own_seed: Stream(),
}


@pytest.mark.parametrize("length", [{"num_epochs": 3}, {"num_steps": 7}])
@pytest.mark.parametrize("batch", [1, 2, 4, 5, 6, 9])
@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
def test_the_batch_that_waits_is_fetched_again_as_it_was(resume, kinds, loader, batch, length):
    """Saved at any batch, while the next one has drawn its random numbers already: all is equal, bit for bit."""
    hooks = lambda: (CloseAtLast(), kinds["Counting"](), kinds["Jitter"]())  # noqa: E731 - two words, used once
    at = lambda ctx: ctx.batch_count == batch  # noqa: E731 - two words, used once
    assert resume(S.AFTER_BATCH, at, hooks=hooks, loader=loader, **length) == []


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_are_found_again(resume, kinds, make_loader, persistent):
    """Workers that are ahead anyway, and those that stay from pass to pass, give the same batches after a resume."""
    hooks = lambda: (CloseAtLast(), kinds["Counting"](), kinds["Jitter"]())  # noqa: E731 - two words, used once
    loader = lambda own_seed: make_loader(own_seed, num_workers=1, persistent_workers=persistent)  # noqa: E731
    at = lambda ctx: ctx.batch_count == 8  # noqa: E731 - two words, used once
    assert resume(S.AFTER_BATCH, at, hooks=hooks, loader=loader, num_epochs=2) == []


@pytest.mark.parametrize("stage", [S.BEFORE_EPOCH, S.AFTER_EPOCH])
def test_between_passes_no_batch_waits(resume, kinds, stage):
    """At the end of a pass nothing has been fetched ahead, and nothing is fetched twice."""
    hooks = lambda: (CloseAtLast(), kinds["Jitter"]())  # noqa: E731 - two words, used once
    at = lambda ctx: ctx.batch_count == 5  # noqa: E731 - two words, used once
    assert resume(stage, at, hooks=hooks, loader=LOADERS["keeps its place"], num_epochs=3) == []


def test_a_run_that_ended_in_the_middle_of_a_pass_goes_on(make_strategy, differences, tmp_path, reseed):
    """Steps k and then n - k in another strategy equal n, though the run of k had a batch waiting when it ended."""
    straight = make_strategy(CloseAtLast(), num_steps=5)
    straight.run(LOADERS["drawn in the main process"](None))
    first = make_strategy(CloseAtLast(), num_steps=2)
    first.run(LOADERS["drawn in the main process"](None))
    save_training(tmp_path, first)
    second = make_strategy(CloseAtLast(), num_steps=3)
    reseed(99)
    load_training(tmp_path, second)
    second.run(LOADERS["drawn in the main process"](None))
    assert differences(straight.state_dict(), second.state_dict()) == []


def test_who_does_not_look_ahead_takes_the_waiting_batch_first(make_strategy, make_loader, kinds, tmp_path):
    """A state with a batch that waits, loaded into a run that looks ahead no more, loses and repeats nothing."""
    seen = []
    see = kinds["Plain"](lambda ctx, stage: seen.append(float(ctx.batch[0].sum())))
    strategy = make_strategy(CloseAtLast(), see, num_steps=2)
    strategy.run(Stream())
    save_training(tmp_path, strategy)
    resumed = make_strategy(see, num_epochs=1)
    with pytest.warns(match="which this run has not"):
        load_training(tmp_path, resumed)
    resumed.run(Stream())
    assert len(seen) == 5 == len(set(seen))
    assert resumed.state_dict()["position"]["ahead"] is None


def test_a_state_from_before_there_was_a_look_ahead_is_taken(make_strategy, make_loader):
    """A state without the place of a waiting batch is complete: nobody looked ahead then."""
    strategy = make_strategy(num_steps=2)
    strategy.run(make_loader())
    state = strategy.state_dict()
    del state["position"]["ahead"]
    make_strategy(num_steps=2).load_state_dict(state)


def test_a_place_of_another_shape_is_refused(make_strategy, make_loader):
    """What stands for the waiting batch is checked like the rest of the position."""
    state = make_strategy(CloseAtLast(), num_steps=2).state_dict()
    state["position"]["ahead"] = {"rng": {}}
    with pytest.raises(CheckpointMismatchError, match=r"position\['ahead'\] has no 'loader'"):
        make_strategy(CloseAtLast(), num_steps=2).load_state_dict(state)
