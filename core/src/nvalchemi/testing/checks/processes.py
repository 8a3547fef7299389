"""Whether the hook goes where processes go."""

from __future__ import annotations

import functools
import multiprocessing
import pickle
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from nvalchemi.testing.checks.base import Batches, Checks, check, require, state_of, weights_of
from nvalchemi.testing.compare import first_difference
from nvalchemi.testing.tiny import tiny_strategy
from nvalchemi.training.hooks import TrainingUpdateHook

__all__ = ["ProcessChecks"]


class ProcessChecks(Checks):
    """Pickling and spawning."""

    @check("keep no lambda, lock, open file or generator in an attribute, or leave it out in __getstate__.")
    def test_it_pickles(self) -> None:
        """A pickled hook is the same hook, with its state, before training and after; and it trains the same."""
        hook, batches = self.fresh_hook(), self.batches(3, vetoed=[1])
        twin = _pickled(hook)
        self.trained(hook, batches=batches)
        for one in (hook, twin):
            require(type(_pickled(one)) is type(one), f"what comes back is a {type(_pickled(one)).__name__}")
            difference = first_difference(_identity(one), _identity(_pickled(one)), "hook")
            require(not difference, f"pickled and back again, {difference}")
        expected = self.trained(self.fresh_hook(), batches=batches)
        actual = self.trained(_pickled(self.fresh_hook()), batches=batches)
        difference = first_difference(weights_of(expected), weights_of(actual), "weights")
        require(not difference, f"trained with the pickled hook, {difference}")

    @check("make no use of what only this process has: module globals that were set at run time, open handles.")
    def test_it_survives_spawn(self) -> None:
        """In a spawned process it trains the same weights as here, bit for bit."""
        batches = self.batches(3, vetoed=[1])
        expected = weights_of(self.trained(self.fresh_hook(), batches=batches))
        sent = pickle.dumps((self.fresh_hook(), batches))
        received = _worker().submit(_train_there, sys.path, torch.get_num_threads(), sent).result(timeout=300)
        difference = first_difference(expected, pickle.loads(received), "weights")
        require(not difference, f"here and in a spawned process {difference}")


def _pickled(hook: Any) -> Any:
    return pickle.loads(pickle.dumps(hook))


def _identity(hook: Any) -> dict[str, Any]:
    """Return what makes a hook the one it is."""
    key = hook.state_key if isinstance(hook, TrainingUpdateHook) else type(hook).__name__
    return {"state_key": key, "state": state_of(hook)}


@functools.cache
def _worker() -> ProcessPoolExecutor:
    """Return a spawned process; one serves every hook of a test run, since it has to import torch."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def _train_there(path: list[str], threads: int, sent: bytes) -> bytes:
    """Train a hook that comes from elsewhere; as bytes, because tensors would be shared between the processes."""
    sys.path[:] = path
    torch.set_num_threads(threads)
    hook: Any
    batches: Batches
    hook, batches = pickle.loads(sent)
    strategy = tiny_strategy(hook)
    strategy.run(batches)
    return pickle.dumps(weights_of(strategy))
