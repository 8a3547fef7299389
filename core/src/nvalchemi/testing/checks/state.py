"""Whether the hook's state is all there is to know, and nobody else's."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from typing import TYPE_CHECKING, Any

import torch

from nvalchemi.testing.checks.base import Checks, check, require, state_of
from nvalchemi.testing.compare import first_difference
from nvalchemi.testing.doubles import VetoingHook
from nvalchemi.testing.tiny import tiny_strategy
from nvalchemi.training import TrainingStage

if TYPE_CHECKING:
    from nvalchemi.hooks import TrainContext

__all__ = ["StateChecks"]

_BATCHES = 6


class _Stop(Exception):
    """The run has been saved."""


class _SaveAt:
    """Takes the state of the run after so many batches, and stops it there."""

    frequency, stage = 1, TrainingStage.AFTER_BATCH

    def __init__(self, batches: int | None = None) -> None:
        self.batches = batches
        self.state: dict[str, Any] = {}

    def __call__(self, ctx: TrainContext, stage: TrainingStage) -> None:
        if ctx.batch_count == self.batches:
            self.state = ctx.workflow.state_dict()
            raise _Stop


class StateChecks(Checks):
    """Saving, loading, resuming."""

    @check("keep tensors, numbers, strings, lists and dicts in the state, from the beginning; no objects, no numpy.")
    def test_its_state_loads_before_the_first_step(self) -> None:
        """The state of a new hook is plain data, and another new hook takes it."""
        self.needs_state()
        self._goes_round(self.fresh_hook())

    @check("keep tensors, numbers, strings, lists and dicts in the state; take over all of it in load_state_dict.")
    def test_its_state_loads_after_some_steps(self) -> None:
        """The state of a hook that has trained is plain data, and a new hook that takes it has the same state."""
        self.needs_state()
        hook = self.fresh_hook()
        self.trained(hook, batches=self.batches(3, vetoed=[1]))
        self._goes_round(hook)

    @check("clone tensors in state_dict and in load_state_dict; do not hand out or keep what you go on changing.")
    def test_its_state_is_a_copy(self) -> None:
        """Training on changes neither a state that was taken nor one that was loaded."""
        self.needs_state()
        hook = self.fresh_hook()
        strategy = self.trained(hook, batches=self.batches(3))
        taken = hook.state_dict()
        kept = copy.deepcopy(taken)
        strategy.run(self.batches(2))
        difference = first_difference(kept, taken, "the state that was taken")
        require(not difference, f"training went on, and {difference}")
        loaded = self.fresh_hook()
        given = copy.deepcopy(kept)
        loaded.load_state_dict(given)
        self.trained(loaded, batches=self.batches(2))
        difference = first_difference(kept, given, "the state that was loaded")
        require(not difference, f"training went on, and {difference}")

    @check("put all that later steps depend on into state_dict, counters and tensors alike, and take it back.")
    def test_a_resumed_run_equals_a_straight_one(self) -> None:
        """Training n steps equals k steps, save, load, and n - k steps, bit for bit; also right after a veto."""
        expected = self._end(self.fresh_hook(), _SaveAt())
        for k in (2, 4):  # the second batch is vetoed by another hook
            save = _SaveAt(k)
            stopped = tiny_strategy(VetoingHook(1), self.fresh_hook(), save)
            with contextlib.suppress(_Stop):
                stopped.run(self.batches(_BATCHES, vetoed=[3]))
            try:
                saved = _through_file(save.state)
            except pickle.UnpicklingError as error:
                self.applies(False, f"what was saved cannot be loaded, as another check tells: {error}")
            # Not fresh: what the stopped hook left in its folder is part of what is resumed.
            actual = self._end(self.make_hook(), _SaveAt(), state=saved)
            difference = first_difference(expected, actual, "run")
            require(not difference, f"straight through, and resumed after {k} of {_BATCHES} batches: {difference}")

    def _end(self, hook: Any, save: _SaveAt, *, state: dict[str, Any] | None = None) -> dict[str, Any]:
        strategy = tiny_strategy(VetoingHook(1), hook, save)
        if state is not None:
            strategy.load_state_dict(state)
        strategy.run(self.batches(_BATCHES, vetoed=[3]))
        end = {part: value for part, value in strategy.state_dict().items() if part != "position"}
        for record in end["hooks"].values():
            record.update({"state": self.progress_in(record["state"])} if "state" in record else {})
        return end

    def _goes_round(self, hook: Any) -> None:
        state = hook.state_dict()
        loaded = _through_file(state)
        other = self.make_hook()
        other.load_state_dict(loaded)
        difference = first_difference(state, state_of(other))
        require(not difference, f"saved, and loaded into a new hook, {difference}")


def _through_file(state: dict[str, Any]) -> dict[str, Any]:
    """Save and load a state as a checkpoint does, without running any code of its own."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded
