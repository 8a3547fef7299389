"""What one rank sees of a loader."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
)

from nvalchemi.errors import HookConflictError
from nvalchemi_hooks_distributed.loading import part_of, samplers_of


def parts(loader, *, ranks=2, training=True, even=True):
    return [part_of(loader, rank, ranks, training=training, even=even, seed=0) for rank in range(ranks)]


def samples(part):
    return [int(sample) for batch in part for sample in batch]


def test_ranks_share_the_samples_in_their_order():
    """A loader that does not shuffle deals its samples out, batch by batch."""
    assert [samples(part) for part in parts(DataLoader(range(8), batch_size=2))] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_all_ranks_have_as_many_batches():
    """Where the samples do not divide, some are seen twice, or left out with ``drop_last``."""
    assert [len(part) for part in parts(DataLoader(range(9), batch_size=2))] == [3, 3]
    assert [samples(part) for part in parts(DataLoader(range(9), batch_size=2, drop_last=True))] == [
        [0, 2, 4, 6],
        [1, 3, 5, 7],
    ]


def test_a_loader_that_shuffles_shuffles_anew_each_epoch():
    """Ranks see different samples, all of them together, in an order that the number of the epoch decides."""
    first, second = parts(DataLoader(range(8), batch_size=2, shuffle=True))
    before = samples(first)
    assert sorted(before + samples(second)) == list(range(8))
    for sampler in samplers_of(first):
        sampler.set_epoch(1)
    assert samples(first) != before


def test_an_evaluation_sees_each_sample_once():
    """What is not trained on need not be even: one rank may have a batch more, or none."""
    assert [samples(part) for part in parts(DataLoader(range(5)), training=False, even=False)] == [[0, 2, 4], [1, 3]]
    assert samples(parts(DataLoader(range(1)), training=False, even=False)[1]) == []


@pytest.mark.parametrize("kind", [list, DataLoader])
def test_of_other_iterables_every_nth_batch_is_seen(kind):
    """A list of batches, or a stream, is dealt out by batches; a last round that does not go round is left out."""

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(5))

    loader = [[0], [1], [2], [3], [4]] if kind is list else DataLoader(Stream(), batch_size=1)
    assert [samples(part) for part in parts(loader)] == [[0, 2], [1, 3]]
    assert [samples(part) for part in parts(loader, even=False)] == [[0, 2, 4], [1, 3]]
    if kind is list:
        assert [[len(part) for part in parts(loader, even=even)] for even in (True, False)] == [[2, 2], [3, 2]]


def test_a_distributed_sampler_is_left_alone():
    """A loader that is divided already stays what it is."""
    loader = DataLoader(range(8), sampler=DistributedSampler(range(8), 2, 1))
    assert part_of(loader, 1, 2, training=True, even=True, seed=0) is loader


def test_the_rest_of_a_loader_stays():
    """Batch size, collation and workers are those of the loader that was given."""
    loader = DataLoader(range(8), batch_size=2, collate_fn=tuple, timeout=0, worker_init_fn=print)
    part = parts(loader)[0]
    assert (part.batch_size, part.collate_fn, part.worker_init_fn) == (2, tuple, print)


class OddLoader(DataLoader):
    def __init__(self, length):
        super().__init__(range(length))


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (DataLoader(range(8), sampler=SubsetRandomSampler([1, 2])), "its sampler is a SubsetRandomSampler"),
        (DataLoader(range(8), sampler=DistributedSampler(range(8), 4, 1)), "that of rank 1 of 4"),
        (
            DataLoader(range(8), batch_sampler=type("Odd", (BatchSampler,), {})(SequentialSampler(range(8)), 2, False)),
            "its batch_sampler is a Odd",
        ),
        (OddLoader(8), "cannot be made again"),
    ],
)
def test_a_loader_that_draws_in_its_own_way_is_refused(loader, why):
    """What cannot be divided is named, with the way out."""
    with pytest.raises(HookConflictError, match=f"(?s){why}.*split_data=False"):
        parts(loader)


def test_a_loader_may_be_of_an_own_class():
    """A class that is made like a DataLoader stays that class."""

    class Own(DataLoader):
        pass

    assert type(parts(Own(torch.arange(4)))[0]) is Own
