"""Several ranks train as one process with the whole batch, and send no more than they have to."""

from __future__ import annotations

import pytest
import torch

EVERYWHERE = ["one bad sample", "lazy", "sharded", "loaded"]
ON_TWO = ["all good", "without a scale", "lazy, without a scale"]
RANKS = [(2, 0), (2, 1), (4, 0), (4, 1), (4, 2), (4, 3)]


def assert_same(seen, expected):
    for part in ("weights", "average"):
        for name, tensor in expected[part].items():
            torch.testing.assert_close(seen[part][name], tensor, rtol=0, atol=1e-6, msg=f"{part} {name}")
    for part in ("scale", "counters", "lr"):
        assert seen[part] == expected[part], part
    assert seen["norm"] == pytest.approx(expected["norm"], rel=1e-5)


@pytest.mark.parametrize("process", RANKS, ids=str)
@pytest.mark.parametrize("case", EVERYWHERE)
def test_ranks_train_as_one_process(seen, process, case):
    """After 50 steps weights, average, scale and counters are those of one process, also with one nan on one rank."""
    assert seen[1, 0][case]["counters"]["steps"] == 50
    assert_same(seen[process][case], seen[1, 0][case])


@pytest.mark.parametrize("process", RANKS[:2], ids=str)
@pytest.mark.parametrize("case", ON_TWO)
def test_so_they_do_without_a_scale_or_a_bad_sample(seen, process, case):
    """The same holds where nothing is skipped, and where no loss scale is there to find what is not finite."""
    assert_same(seen[process][case], seen[1, 0][case])


def test_the_bad_sample_was_skipped_once(seen):
    """Every rank skipped the one batch in which one rank saw a nan, and backed the scale off once."""
    for figures in seen.values():
        counters = figures["one bad sample"]["counters"]
        assert (counters["batches"], counters["updates"]) == (51, 50)
        assert counters["skips"]["total_skips"] == 1
        assert figures["one bad sample"]["scale"]["scale"] == 2.0**10 / 2 * 2**4


def test_a_shard_is_trained_by_the_global_norm(seen):
    """With parameters of odd length spread over ranks, clipping is by the norm of all of them."""
    norms = [figures["sharded"]["norm"] for figures in seen.values()]
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-5)


@pytest.mark.parametrize("process", RANKS[:2], ids=str)
@pytest.mark.parametrize("update", ["eager", "lazy"])
def test_a_step_sends_gradients_and_one_message(seen, process, update):
    """With loss scale, veto, clipping, average and shared numbers, five steps send five times gradients and one sum."""
    assert seen[process]["sent"][update] == {"gradients": 5, "all_reduce": 5}


@pytest.mark.parametrize("process", RANKS[:2], ids=str)
def test_two_batches_to_a_step_send_no_more(seen, process):
    """Accumulation that may drop batches, and spike skipping, add nothing: three windows send three times."""
    assert seen[process]["sent"]["accumulating"] == {"gradients": 3, "all_reduce": 3}


def test_numbers_are_added_up(seen):
    """What hooks share is added up: 4 samples on each of two ranks are 8, 4 in the mean."""
    for rank in range(2):
        assert seen[2, rank]["shared"] == [(8.0, 4.0)] * 3


def test_steps_are_counted_for_every_rank(seen):
    """``global_step_count`` grows by the number of ranks."""
    assert [seen[2, rank]["counted"] for rank in range(2)] == [(2, 4), (2, 4)]


def test_validation_is_that_of_one_process(seen):
    """Losses are added up over ranks, each sample once, also where the samples do not divide by the ranks."""
    for rank in range(2):
        assert seen[2, rank]["validated"]["batches"] == 22
        assert seen[2, rank]["validated"] == pytest.approx(seen[1, 0]["validated"], rel=1e-6)


def test_every_epoch_shows_each_sample_to_one_rank_in_a_new_order(seen):
    """Two ranks share the samples of an epoch between them, and the next epoch shuffles them anew."""
    epochs = [
        [[sample for n, *samples in seen[2, rank]["epochs"] if n == epoch for sample in samples] for rank in range(2)]
        for epoch in range(2)
    ]
    for first, second in epochs:
        assert sorted(first + second) == list(range(16))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_differ_are_named_on_every_rank(seen, rank):
    """Other hooks, other lengths of loaders and other batches at a step are refused on each rank, with both named."""
    figures = seen[2, rank]
    assert "rank 1 has totals (Totals, no distribution)" in figures["other hooks"]
    assert "(3 on rank 0, 4 on rank 1" in figures["other lengths"]
    assert "(rank 0: batch 4, 0 numbers shared; rank 1: batch 5, 0 numbers shared)" in figures["other batches"]
    assert "rank 1: batch 0, the last of its pass, 0 numbers" in figures["other ends"]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_end_at_different_places_are_named_before_one_waits_in_vain(seen, rank):
    """Streams of which one ends earlier are refused at its last step, and other goals at the start, on each rank."""
    figures = seen[2, rank]
    assert "(rank 0: batch 2, the last of its pass, 0 numbers" in figures["other ends of streams"]
    assert "goal 3; rank 1: step 0, batch 0, epoch 0, goal 4)" in figures["other goals"]


@pytest.mark.parametrize("rank", [0, 1])
def test_batches_are_accumulated_under_a_static_graph(seen, rank):
    """``DDPHook(static_graph=True)``, which has to reduce at every batch, comes to the same weights."""
    usual, static = seen[2, rank]["accumulated"]
    for name, tensor in usual.items():
        torch.testing.assert_close(static[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sharded_model_is_validated_on_a_batch_for_each_rank_at_least(seen, rank):
    """Where there are fewer batches than ranks, the message says how many it takes."""
    assert "at least one batch for each rank" in seen[2, rank]["too few to validate"]


def test_a_norm_that_takes_a_message_is_not_asked_for_by_chance(seen):
    """A plain hook that asks for the norm of sharded gradients before the step is told when it is known."""
    for rank in range(2):
        assert "ask in before_optimizer_step" in seen[2, rank]["early norm"]
