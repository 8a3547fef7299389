"""How long a run is, how it goes on, and when it is stopped because nothing is trained."""

from __future__ import annotations

import re

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from nvalchemi.errors import NoProgressError
from nvalchemi.training import OptimizerConfig, TrainingStage, TrainingStrategy
from nvalchemi.training.hooks import TrainingUpdateHook

S = TrainingStage


@pytest.mark.parametrize("length", [{}, {"num_epochs": 2, "num_steps": 5}, {"num_epochs": None, "num_steps": None}])
def test_exactly_one_of_epochs_and_steps_is_given(batches, length):
    """`num_epochs` and `num_steps` both, or neither, is a ValueError that says which, and to give exactly one."""
    which = r"both are given \(2 and 5\)" if length.get("num_steps") else "neither is given"
    with pytest.raises(ValueError, match=rf"num_epochs or num_steps.*{which}.*give exactly one"):
        TrainingStrategy(
            models=torch.nn.Linear(2, 1), optimizer_configs=OptimizerConfig(), loss_fn=lambda p, b: p.sum(), **length
        )


@pytest.mark.parametrize("name", ["num_epochs", "num_steps"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "3"])
def test_a_length_is_an_int_of_one_or_more(make_strategy, name, value):
    """A length that is not an int of 1 or more is a ValueError with its name, its value and what it must be."""
    with pytest.raises(ValueError, match=rf"{name} is {re.escape(repr(value))}; it must be an int of 1 or more"):
        make_strategy(**{name: value})


def test_num_epochs_counts_passes_over_the_loader(make_strategy, veto, batches):
    """`num_epochs` counts passes over the loader, whatever was vetoed in them."""
    strategy = make_strategy(veto(0, 1, 5), num_epochs=3)
    strategy.run(batches)
    assert (strategy.epoch, strategy.batch_count, strategy.step_count) == (3, 12, 9)


def test_num_steps_counts_executed_optimizer_steps(make_strategy, veto, batches):
    """`num_steps` counts executed optimizer steps: vetoed batches do not bring the end nearer."""
    strategy = make_strategy(veto(0, 1, 5), num_steps=6)
    strategy.run(batches)
    assert (strategy.step_count, strategy.batch_count) == (6, 9)


@pytest.mark.parametrize(("length", "counts"), [({"num_epochs": 2}, (8, 16)), ({"num_steps": 3}, (3, 6))])
def test_a_second_run_goes_on(make_strategy, batches, length, counts):
    """A second `run` trains as long again, from where the first one ended, with the same optimizers."""
    strategy = make_strategy(**length)
    strategy.run(batches)
    optimizers, first = list(strategy.optimizers), strategy.step_count
    strategy.run(batches)
    assert (first, strategy.step_count) == counts
    assert len(optimizers) == 1
    assert all(a is b for a, b in zip(optimizers, strategy.optimizers, strict=True))


def test_two_runs_equal_one_of_twice_the_length(make_strategy, batches):
    """Twice one epoch is two epochs, bit for bit: optimizer state and scheduler go on."""
    config = OptimizerConfig(
        optimizer_cls="AdamW", optimizer_kwargs={"lr": 0.1}, scheduler_cls="StepLR", scheduler_kwargs={"step_size": 3}
    )
    torch.manual_seed(1)
    twice = make_strategy(models=torch.nn.Linear(2, 1), optimizer_configs=config, num_epochs=1)
    torch.manual_seed(1)
    once = make_strategy(models=torch.nn.Linear(2, 1), optimizer_configs=config, num_epochs=2)
    twice.run(batches)
    twice.run(batches)
    once.run(batches)
    for a, b in zip(twice.models["main"].parameters(), once.models["main"].parameters(), strict=True):
        assert torch.equal(a, b)
    assert twice.lr_schedulers[0].get_last_lr() == once.lr_schedulers[0].get_last_lr()


def test_batches_before_a_run_do_not_shorten_it(make_strategy, batches):
    """`train_batch` before `run` moves the counters, and the run is as long as it says from there."""
    strategy = make_strategy(num_steps=3)
    strategy.train_batch(batches[0])
    strategy.run(batches)
    assert strategy.step_count == 4


class Stream(IterableDataset):
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("kind", ["list", "tuple", "generator", "DataLoader", "stream"])
def test_any_iterable_is_a_loader(make_strategy, batches, kind, shown, capsys):
    """A list, a tuple, a generator and a DataLoader, also over a stream of unknown length, are loaders."""
    loaders = {
        "list": list(batches),
        "tuple": tuple(batches),
        "generator": (batch for batch in batches),
        "DataLoader": DataLoader(batches, batch_size=None),
        "stream": DataLoader(Stream(batches), batch_size=None),
    }
    strategy = make_strategy(progress=shown)
    strategy.run(loaders[kind])
    assert strategy.step_count == 4


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        ([], r"The loader \(list\) gave no batches in epoch 0: it is empty; give a list or a DataLoader"),
        (iter([]), r"The loader \(list_iterator\) gave no batches in epoch 0: it is an iterator, .* used up"),
    ],
)
def test_an_empty_loader_is_refused(make_strategy, loader, why):
    """A loader without batches is a ValueError that names it and the remedy, and counts nothing."""
    strategy = make_strategy()
    with pytest.raises(ValueError, match=why):
        strategy.run(loader)
    assert (strategy.epoch, strategy.batch_count, strategy.step_count) == (0, 0, 0)


@pytest.mark.parametrize("length", [{"num_epochs": 2}, {"num_steps": 6}])
def test_a_used_up_iterator_is_refused(make_strategy, batches, length):
    """An iterator that is used up before the run is over is a ValueError that says so, after what it could train."""
    strategy = make_strategy(**length)
    with pytest.raises(
        ValueError, match=r"gave no batches in epoch 1: it is an iterator, which is used up.*give a list"
    ):
        strategy.run(iter(batches))
    assert (strategy.epoch, strategy.step_count) == (1, 4)
    strategy.run(batches)  # finishes what was wanted
    assert strategy.step_count == length.get("num_steps", 8)


def test_a_loader_that_cannot_be_iterated_is_refused_before_anything_happens(make_strategy, plain):
    """Something that is no iterable is a TypeError that says so before any stage of the run is dispatched."""
    log = []
    strategy = make_strategy(plain(lambda ctx, stage: log.append(stage), S.BEFORE_TRAINING, S.BEFORE_EPOCH))
    with pytest.raises(TypeError, match=r"(?i)loader.*int"):
        strategy.run(5)
    assert log == []


def test_a_whole_pass_without_a_step_stops_the_run_and_names_who_vetoed(make_strategy, veto, batches):
    """A whole pass over the loader without one step is a NoProgressError that names who vetoed, how often and why."""
    strategy = make_strategy(veto(4, 5, 6, 7, reason="too steep"), num_epochs=9)
    with pytest.raises(
        NoProgressError, match=r"whole pass.*\(4 batches\).*vetoed by veto \(too steep\) 4 times"
    ) as info:
        strategy.run(batches)
    assert isinstance(info.value, RuntimeError)
    assert (strategy.epoch, strategy.step_count, strategy.batch_count) == (1, 4, 8)


def test_no_progress_names_every_hook_that_vetoed(make_strategy, veto, batches):
    """Of several hooks that vetoed, each is named with its own count, by its state key."""
    always, twice = veto(reason="always").labelled("gate"), veto(0, 2)
    strategy = make_strategy(always, twice)
    with pytest.raises(NoProgressError, match=r"gate \(always\) 4 times[;,] .*veto \(returned False\) 2 times"):
        strategy.run(batches)


def test_no_progress_without_a_veto_says_that_there_was_no_gradient(make_strategy, batches):
    """Where no hook vetoed, the message says that there was no gradient, and it counts no step."""
    unused = torch.zeros((), requires_grad=True)
    strategy = make_strategy(loss_fn=lambda predictions, batch: unused * 1.0)
    with pytest.raises(NoProgressError, match="no hook vetoed: no optimizer had a gradient"):
        strategy.run(batches)


def test_no_progress_in_a_window_that_never_ends_says_so(make_strategy, batches):
    """Where the window stayed open for the whole pass, the message says that, not that gradients were missing."""

    class NeverComplete(TrainingUpdateHook):
        def before_batch(self, ctx, *, will_skip):
            ctx.window_complete = False
            return False

    with pytest.raises(NoProgressError, match="window"):
        make_strategy(NeverComplete()).run(batches)


def test_a_run_that_made_no_progress_is_closed(make_strategy, managed, veto, batches):
    """When a run is stopped for lack of progress, its hooks are left and the modes are given back."""
    log = []
    model = torch.nn.Linear(2, 1).eval()
    with pytest.raises(NoProgressError):
        make_strategy(managed(log), veto(), models=model).run(batches)
    assert log == ["enter hook", "exit hook NoProgressError"]
    assert not model.training
