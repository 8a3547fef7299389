"""Whether the hook goes where processes go."""

from __future__ import annotations

import functools
import multiprocessing
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor

from nvalchemi.testing.checks.base import Batches, Checks, check, require, state_of, weights_of
from nvalchemi.testing.compare import first_difference
from nvalchemi.testing.tiny import tiny_strategy
from nvalchemi.training.hooks import TrainingUpdateHook

__all__ = ["ProcessChecks"]


class ProcessChecks(Checks):
    """Pickling and spawning."""

    @check("keep no lambda, lock, open file or generator in an attribute, or leave it out in __getstate__.")
    def test_it_pickles(self) -> None:
        """A pickled hook is the same hook, with label and state, before training and after; and it trains the same."""
        for trained in (False, True):
            hook = self._hook(trained)
            difference = first_difference(_identity(hook), _identity(_pickled(hook)), "hook")
            require(not difference, f"pickled and back again, {difference}")
        self._trains_the_same(_pickled, "with the pickled hook")

    @check("make no use of what only this process has: module globals that were set at run time, open handles.")
    def test_it_survives_spawn(self) -> None:
        """In a spawned process it trains the same weights as here, bit for bit, before training here and after."""
        self._trains_the_same(lambda hook: hook, "in a spawned process", there=True)

    def _hook(self, trained: bool) -> Any:
        hook = self.fresh_hook()
        if isinstance(hook, TrainingUpdateHook):
            hook.labelled("mine")
        if trained:
            self.trained(hook, batches=self.batches(3, vetoed=[1]))
        return hook

    def _trains_the_same(self, moved: Callable[[Any], Any], where: str, *, there: bool = False) -> None:
        batches = self.batches(3, vetoed=[1])
        for trained in (False, True):
            expected, hook = _train(self._hook(trained), batches), moved(self._hook(trained))
            actual = _train_there(hook, batches) if there else _train(hook, batches)
            difference = first_difference(expected, actual, "weights")
            require(not difference, f"trained {where}, {'after' if trained else 'before'} training here: {difference}")


def _pickled(hook: Any) -> Any:
    return pickle.loads(pickle.dumps(hook))


def _identity(hook: Any) -> dict[str, Any]:
    """Return what makes a hook the one it is."""
    key = hook.state_key if isinstance(hook, TrainingUpdateHook) else ""
    return {"class": f"{type(hook).__module__}.{type(hook).__qualname__}", "state_key": key, "state": state_of(hook)}


def _train(hook: Any, batches: Batches) -> dict[str, Tensor]:
    strategy = tiny_strategy(hook)
    strategy.run(batches)
    return weights_of(strategy)


@functools.cache
def _worker() -> ProcessPoolExecutor:
    """Return a spawned process; one serves every hook of a test run, since it has to import torch."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def _train_there(hook: Any, batches: Batches) -> dict[str, Tensor]:
    """Train in the other process; bytes travel, because tensors would be shared between the two."""
    sent = pickle.dumps((hook, batches))
    received = _worker().submit(_train_what_was_sent, sys.path, torch.get_num_threads(), sent).result(timeout=300)
    weights: dict[str, Tensor] = pickle.loads(received)
    return weights


def _train_what_was_sent(path: list[str], threads: int, sent: bytes) -> bytes:
    sys.path[:] = path
    torch.set_num_threads(threads)
    return pickle.dumps(_train(*pickle.loads(sent)))
