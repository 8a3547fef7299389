"""A step whose outcome the host does not know yet, and the numbers that are on their way to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nvalchemi.training.hooks.decision import pack, read_together

if TYPE_CHECKING:
    from nvalchemi.hooks.context import TrainContext
    from nvalchemi.training.hooks.stepping import StepOutcome, Waiting
    from nvalchemi.training.hooks.window import UpdateWindow

__all__ = ["HostMirror", "PendingStep"]

_is_cpu = attrgetter("is_cpu")


class HostMirror:
    """0-dim tensors, copied to the host without waiting for the device.

    On CUDA they are packed, copied into pinned memory, and an event says when they are there. What lies in the memory
    of the host is read at once; any other device is asked when the numbers are wanted. While a CUDA graph is captured
    they are packed only: there is nothing to copy until it is replayed.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        on_host = all(map(_is_cpu, tensors))
        self._send(tensors, None if on_host else pack(tensors))

    def again(self) -> HostMirror:
        """Return a mirror of the same tensors, which have other values now."""
        mirror = HostMirror.__new__(HostMirror)
        mirror._send(self._tensors, self._on_device)
        return mirror

    def _send(self, tensors: Sequence[Tensor], packed: Tensor | None) -> None:
        self._tensors, self._on_device = tensors, packed
        self._values: list[float] | None = None
        self._event: torch.cuda.Event | None = None
        if packed is None:
            self._values = read_together(tensors)
            return
        self._packed = packed
        if packed.is_cuda and not torch.cuda.is_current_stream_capturing():
            host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._packed = host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> list[float]:
        """Return the numbers; the device has long passed them if this is asked a step later."""
        if self._values is None:
            if self._event is not None:
                self._event.synchronize()
            self._values = self._packed.tolist()
        return self._values


class PendingStep:
    """A step that was carried out under a veto which is still on the device.

    Parameters
    ----------
    ctx : TrainContext
        The context of its batch.
    window : UpdateWindow
        Its window.
    waiting : Waiting
        How to get at the outcome.
    resolve : callable
        Has the orchestrator get at it and tell everybody.

    Attributes
    ----------
    announced : bool
        AFTER_OPTIMIZER_STEP is over: ``settled`` follows as soon as the host knows.
    """

    def __init__(self, ctx: TrainContext, window: UpdateWindow, waiting: Waiting, resolve: Callable[[], Any]) -> None:
        self.ctx = ctx
        self.announced = False
        self._window: UpdateWindow | None = window
        self.waiting, self._resolve = waiting, resolve
        self._batches = ctx.batch_count, ctx.epoch_step_count
        self._counting: list[TrainContext] = []
        self._followers: list[Callable[[TrainContext], None]] = []

    def resolve(self) -> None:
        """Let the host know, unless it does."""
        if self._window is not None:
            self._resolve()

    def finish(self) -> StepOutcome:
        """Wait for the outcome, move the schedulers, and return what happened; called once."""
        window, self._window = self._window, None
        assert window is not None
        window.await_outcome(None, None)
        self.ctx.pending = None
        return self.waiting.finish(self.ctx)

    def tell_as_it_was(self, told: Callable[[TrainContext, StepOutcome], None], outcome: StepOutcome) -> None:
        """Tell hooks the outcome, with the counts of batches in the context as they were at the step."""
        ctx = self.ctx
        later = ctx.batch_count, ctx.epoch_step_count
        ctx.batch_count, ctx.epoch_step_count = self._batches
        try:
            told(ctx, outcome)
        finally:
            ctx.batch_count, ctx.epoch_step_count = later

    def count_for(self, ctx: TrainContext) -> None:
        """Have the step counts of a context depend on this step."""
        self._counting.append(ctx)

    def counts_for(self, ctx: TrainContext) -> bool:
        """Return whether they do."""
        return self._window is not None and any(map(is_, self._counting, repeat(ctx)))

    def then(self, follower: Callable[[TrainContext], None]) -> None:
        """Have somebody called with the context once the outcome is known, after the hooks."""
        self._followers.append(follower)

    def tell(self) -> None:
        """Call everybody who wants to know."""
        for follower in self._followers:
            follower(self.ctx)
