"""Whether the hook lets go of what it holds."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

from nvalchemi.hooks import Closable, Enterable
from nvalchemi.testing.checks.base import Checks, check, require
from nvalchemi.testing.doubles import FailingHook, VetoingHook
from nvalchemi.testing.tiny import tiny_strategy
from nvalchemi.training import TrainingStrategy

__all__ = ["LifetimeChecks"]


class _Mishap(Exception):
    """What goes wrong in a batch."""


class LifetimeChecks(Checks):
    """Closing, and keeping nothing."""

    @check("let close() and __exit__ be called when everything is closed already, and do nothing then.")
    def test_it_closes_twice(self) -> None:
        """After a run it can be closed, closed again, and used in another run."""
        hook = self._that_closes()
        strategy = self.trained(hook, batches=self.batches(2))
        for _ in range(2):
            if isinstance(hook, Closable):
                hook.close()
            else:
                hook.__exit__(None, None, None)
        strategy.run(self.batches(2))

    @check("close only what was opened; raise nothing in close() or __exit__ because a batch did not end as it should.")
    def test_it_closes_after_an_exception(self) -> None:
        """An exception in the middle of a run stays what is raised, closing adds no failure, and the run can go on."""
        hook = self._that_closes()
        mishap = _Mishap("in the middle of a run")
        strategy = tiny_strategy(hook, FailingHook(mishap, at=1))
        batches = self.batches(3)
        try:
            strategy.run(batches)
        except _Mishap as error:
            failures = [note for note in getattr(error, "__notes__", ()) if note.startswith("Closing ")]
            require(not failures, f"closing failed after an exception: {failures}")
        else:
            raise AssertionError("the run went on although another hook had raised")
        strategy.run(batches)

    @check("keep loss.detach() or a number, never a tensor with a graph; keep no context and no prediction.")
    def test_it_keeps_no_graph_alive(self) -> None:
        """When a batch has ended its graph is gone: after a step, after a veto and after an exception."""
        graphs: list[weakref.ref[Any]] = []

        def loss_fn(predictions: Any, batch: Any) -> Any:
            return _Marked.apply((predictions - batch[1]).square().mean(), graphs)  # type: ignore[no-untyped-call]

        hooks = (VetoingHook(1), FailingHook(_Mishap("at the end of a batch"), at=3), self.fresh_hook())
        with self.stepwise(*hooks, loss_fn=loss_fn) as strategy:
            for what, batch in zip(("a step", "a veto", "an exception"), self.batches(3), strict=True):
                _train_whatever_happens(strategy, batch)
                if graphs[-1]() is not None:
                    gc.collect()  # a cycle is no fault
                require(graphs[-1]() is None, f"the graph of a batch is alive after {what}")

    def _that_closes(self) -> Any:
        hook = self.fresh_hook()
        self.applies(isinstance(hook, Closable | Enterable), "it has neither close() nor __enter__ and __exit__")
        return hook


class _Token:
    """Lives as long as the graph that holds it."""


class _Marked(torch.autograd.Function):
    """The identity, with a token in the graph and a weak reference to it in a list."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, graphs: list[weakref.ref[Any]]) -> torch.Tensor:
        ctx.token = _Token()
        graphs.append(weakref.ref(ctx.token))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def _train_whatever_happens(strategy: TrainingStrategy, batch: Any) -> None:
    """Take a batch in a frame of its own, so that nothing here keeps the context or the traceback."""
    try:
        strategy.train_batch(batch)
    except _Mishap as error:
        error.__traceback__ = None  # its frames hold the loss
