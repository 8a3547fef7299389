"""One rank among several, as ``torchrun`` tells it: before there is a process group, and what it keeps to itself."""

from __future__ import annotations

import logging

import pytest
import torch

from nvalchemi.hooks import PreparesLoader
from nvalchemi.testing import tiny_batches, tiny_strategy
from nvalchemi.training import TrainingStage, Validation
from nvalchemi.training.arguments import chosen_device, global_rank, local_rank
from nvalchemi.training.hooks import PassThrough


@pytest.fixture
def second(monkeypatch):
    """What torchrun tells rank 3 of 4, the second of its machine."""
    for name, value in {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)


def test_the_environment_says_which_rank_this_is(second):
    """Without a process group the rank is that of the environment, and the device that of the machine."""
    assert (global_rank(), local_rank()) == (3, 1)
    assert chosen_device(["cpu", "meta"], {}) == torch.device("meta")


def test_half_a_word_of_the_environment_is_none(monkeypatch):
    """A variable RANK that belongs to something else, without WORLD_SIZE, changes nothing."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "3")
    assert global_rank() == 0


def test_another_rank_shows_no_progress(second, capfd):
    """A progress bar that was asked for is shown by the first rank alone."""
    tiny_strategy(progress=True).run(tiny_batches(2))
    assert capfd.readouterr() == ("", "")


def test_another_rank_logs_no_hooks(second, caplog, monkeypatch):
    """What was activated is logged once, by the first rank."""
    with caplog.at_level(logging.INFO, "nvalchemi.hooks"):
        tiny_strategy(PassThrough())
        assert not caplog.records
        monkeypatch.setenv("RANK", "0")
        tiny_strategy(PassThrough())
    assert [record.getMessage() for record in caplog.records]


class Half:
    """Sees every second batch, and is asked as often as there is something to iterate."""

    frequency, stage = 1, TrainingStage.SETUP

    def __init__(self):
        self.asked = []

    def __call__(self, ctx, stage):
        """Nothing is to be set up."""

    def prepare_loader(self, loader, *, training):
        self.asked.append(training)
        return loader[::2]


def test_a_hook_chooses_what_is_seen_of_the_data():
    """What it makes of a loader is trained and validated on."""
    hook = Half()
    assert isinstance(hook, PreparesLoader)
    strategy = tiny_strategy(hook, validation=Validation(loader=tiny_batches(6)))
    strategy.run(tiny_batches(4))
    assert (strategy.batch_count, strategy.validation_result.batches) == (2, 3)
    assert hook.asked == [True, False]


def test_hooks_are_told_which_models_are_trained():
    """``ctx.trained`` names the models that have an optimizer, at SETUP too."""
    seen = []

    class Look(PassThrough):
        def setup(self, ctx):
            seen.append(list(ctx.trained))

    tiny_strategy(Look()).setup()
    assert seen == [["main"]]
