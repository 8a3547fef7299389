"""Capturing a whole update in a CUDA graph, and replaying it batch after batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, distributed

from nvalchemi.errors import HookContractError
from nvalchemi.hooks.protocols import CapturableHook
from nvalchemi.training.batches import move_to
from nvalchemi.training.hooks.executor import why_not_folded
from nvalchemi.training.hooks.orchestrator import TrainingUpdateOrchestrator
from nvalchemi.training.hooks.pending import PendingStep
from nvalchemi.training.hooks.static_memory import LearningRates, StaticBatch, addresses, settings, trained
from nvalchemi.training.hooks.stepping import Waiting, step_schedulers
from nvalchemi.training.hooks.update import TrainingUpdateHook, overrides
from nvalchemi.training.stages import TrainingStage

if TYPE_CHECKING:
    from nvalchemi.hooks.context import TrainContext
    from nvalchemi.training.hooks.stepping import StepOutcome
    from nvalchemi.training.hooks.window import UpdateWindow

__all__ = ["CapturedUpdate", "CudaGraph", "UpdateGraph"]

_NOT_REPLAYED = ("before_batch", "transform_loss", "before_optimizer_step", "after_optimizer_step", "__call__")


class UpdateGraph(Protocol):
    """Remembers what a device was told to do, and has it done again."""

    def capture(self) -> AbstractContextManager[Any]:
        """Return a context in which work for the device is remembered, and not done."""

    def replay(self) -> None:
        """Have all of it done, in the same memory."""


class CudaGraph:
    """An `UpdateGraph` on ``torch.cuda.CUDAGraph``. Untested on a GPU."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self) -> AbstractContextManager[Any]:
        """Return torch's own context, with a pool of memory of its own."""
        context: AbstractContextManager[Any] = torch.cuda.graph(self._graph)
        return context

    def replay(self) -> None:
        """Launch it on the current stream."""
        self._graph.replay()


class CapturedUpdate:
    """A batch in one launch: zero_grad, forward, backward and the update of an orchestrator, as a CUDA graph.

    Call it with a context and a batch. The first batches are carried out as usual, then one is captured, and from there
    on batches are replayed: the host copies the batch into its place, brings learning rates up to date, and launches.
    Vetoes, loss scale and averages are moved by the device; schedulers and counters by the host, when the outcome is
    resolved (see `TrainingUpdateOrchestrator.resolve`), at the latest in the next call. Numbers are those of the same
    orchestrator without capture, with learning rates rounded to float32.

    A batch of another shape, another setting of an optimizer or a hook, a step that is no update for an average: each
    is captured for itself. Weights, buffers or state that have been moved are captured anew.

    Parameters
    ----------
    update : TrainingUpdateOrchestrator
        Lazy. Every hook in it that acts in a batch is a `nvalchemi.hooks.CapturableHook`.
    loss : callable
        Forward and loss: ``loss(batch)`` is a scalar tensor. Its Python runs while a batch is captured, not where it is
        replayed; it must not read from the device.
    warmup : int
        How many batches of a kind are carried out as usual before one is captured; at least 1.
    most : int
        How many kinds there may be.
    graph : callable
        Makes an `UpdateGraph`.

    Raises
    ------
    ValueError
        At construction: the orchestrator is not lazy; `warmup` or `most` is below 1.
    HookContractError
        At construction: a hook does not say how it is replayed; it is named.
    RuntimeError
        At a call: an optimizer is not fused; the update cannot be captured, and why; there are too many kinds, and
        what is new.

    Notes
    -----
    Untested on a GPU. Not for several ranks, for windows of several batches, and for plain hooks between the stages.
    The averages of a model begin with a copy, which is never captured.

    Examples
    --------
    >>> from nvalchemi.hooks import TrainContext
    >>> from nvalchemi.testing import RecordedGraph  # on a GPU leave it out
    >>> weight = torch.nn.Parameter(torch.ones(()))
    >>> optimizer = torch.optim.SGD([weight], lr=0.25, fused=True)
    >>> update = TrainingUpdateOrchestrator(lazy=True)
    >>> captured = CapturedUpdate(update, lambda batch: weight * batch, warmup=1, graph=RecordedGraph)
    >>> for batch in (torch.tensor(1.0), torch.tensor(1.0), torch.tensor(2.0)):
    ...     with TrainContext(optimizers=[optimizer]) as ctx:
    ...         captured(ctx, batch)
    >>> weight.item(), captured.replays
    (0.0, 2)
    """

    def __init__(
        self,
        update: TrainingUpdateOrchestrator,
        loss: Callable[[Any], Tensor],
        *,
        warmup: int = 3,
        most: int = 8,
        graph: Callable[[], UpdateGraph] = CudaGraph,
    ) -> None:
        if not update.lazy:
            raise ValueError("The orchestrator is not lazy, so the host decides on every step; give it lazy=True.")
        if warmup < 1 or most < 1:
            raise ValueError(f"warmup is {warmup!r} and most is {most!r}; both are at least 1.")
        self._update, self._loss, self._graph = update, loss, graph
        self._warmup, self._most = warmup, most
        self._hooks = [said for hook in update.iter_hooks() if (said := _how_it_is_replayed(hook))]
        self._rates = LearningRates()
        self._held: dict[_Key, _Held] = {}
        self._seen: Counter[_Key] = Counter()
        self._key: _Key | None = None
        self._latest: _Held | None = None
        self._obstacle = ""
        self._stream: Any = None
        self.replays = 0

    @property
    def captures(self) -> int:
        """How many graphs are held."""
        return len(self._held)

    def __call__(self, ctx: TrainContext, batch: Any) -> None:
        """Carry out one batch: from zeroed gradients to the step and the hooks that follow it.

        Parameters
        ----------
        ctx : TrainContext
            A new one for each batch, with models, optimizers and schedulers. ``ctx.loss`` holds the loss afterwards.
        batch : Any
            Tensors on any device, or mappings, lists and tuples of them.
        """
        self._update.resolve()
        self._forget_latest_context()
        _refuse_what_cannot_be_replayed(ctx)
        self._rates.fill(ctx.optimizers)
        key = self._key_of(ctx, batch)
        if key is None or (key not in self._held and self._seen[key] < self._warmup):
            self._carry_out(ctx, batch, key)
            return
        if key not in self._held:
            self._held[key] = self._capture(ctx, batch, key)
        self._replay(self._held[key], ctx, batch)

    def _key_of(self, ctx: TrainContext, batch: Any) -> _Key | None:
        """Return all that a graph depends on; None if a hook wants the batch to be carried out as usual."""
        keys = [(hook.state_key, said.capture_key(ctx)) for hook, said in self._hooks]
        if any(key is None for _, key in keys):
            return None
        models = ctx.models.values()
        key: _Key = (
            ("the place of weights, buffers or optimizer state", addresses(models, ctx.optimizers)),
            ("the shape of the batch", StaticBatch.shape(batch)),
            ("the settings of optimizers", settings(ctx.optimizers)),
            ("the mode of the models", tuple(part.training for model in models for part in model.modules())),
            ("which weights are trained", trained(ctx.optimizers)),
            *keys,
        )
        if self._key is not None and key[0] != self._key[0]:  # graphs of the memory before would write into it
            self._held.clear()
            self._seen.clear()
            self._latest = None
        before, self._key = self._key, key
        if key not in self._held and len(self._held) == self._most:
            assert before is not None
            new = [name for name, part in key if part not in [old for known, old in before if known == name]]
            raise RuntimeError(
                f"An update has been captured {self._most} times, and would be once more: what is new is "
                f"{', '.join(new)}. Keep it the same (pad batches to a few shapes, schedule nothing but learning "
                "rates), raise most, or do without capture."
            )
        return key

    def _carry_out(self, ctx: TrainContext, batch: Any, key: _Key | None) -> None:
        """Take a batch as usual, but on the stream and with the learning rates of a captured one."""
        self._latest = None  # its gradients are replaced
        device = _device_of(ctx)
        schedulers = ctx.lr_schedulers
        with self._aside(device):
            self._run(ctx, move_to(batch, device))
        ctx.lr_schedulers = schedulers
        if self._update.pending is None:
            outcome = self._update.last_outcome
            assert outcome is not None
            _move_schedulers(ctx, schedulers, outcome)
            self._obstacle = outcome.resolution
        else:
            self._obstacle = ""
        if key is not None:
            self._seen[key] += 1

    def _run(self, ctx: TrainContext, batch: Any) -> None:
        ctx.lr_schedulers = ()  # they move learning rates that are numbers
        ctx.batch = batch
        with self._rates.on_device():
            self._update(ctx, TrainingStage.BEFORE_BATCH)
            ctx.loss = self._loss(batch)
            self._update(ctx, TrainingStage.DO_BACKWARD)
            if ctx.window_complete:
                ctx.read_later(torch.zeros((), device=ctx.loss.device))  # so that there is something to wait for
            self._update(ctx, TrainingStage.DO_OPTIMIZER_STEP)
            self._update(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)

    def _capture(self, ctx: TrainContext, batch: Any, key: _Key) -> _Held:
        if self._obstacle.startswith("at once"):
            raise RuntimeError(
                f"The update cannot be captured, for the host had to know of the latest step {self._obstacle}. "
                "Optimizers have to be fused, the scaler one of LossScalingHook, and vetoes those that a device can "
                "decide on; or do without capture."
            )
        graph, static = self._graph(), StaticBatch(batch, _device_of(ctx))
        inner = replace(ctx, lr_schedulers=())
        try:
            with graph.capture():
                self._run(inner, static.batch)
        except Exception as error:  # noted and raised again
            error.add_note("It was raised while an update was captured, where the host may not read from the device.")
            raise
        pending = self._update.await_step(None)
        if pending is None or inner.window is None or inner.loss is None:
            raise RuntimeError(
                "The update cannot be captured: somebody asked for its outcome before it was over. Hooks must not read "
                "ctx.step_skipped or what depends on it in a captured batch."
            )
        left = [said.captured(inner) for _, said in self._hooks]
        return _Held(
            graph, static, pending.waiting, inner.window, inner.loss, _gradients(ctx), _Moment(inner.window), left
        )

    def _replay(self, held: _Held, ctx: TrainContext, batch: Any) -> None:
        held.static.fill(batch)
        if self._latest is not held:
            for parameter, gradient in held.gradients:
                parameter.grad = gradient
        held.moment.come_back()
        held.graph.replay()
        self.replays += 1
        self._latest, held.ctx = held, ctx
        waiting = held.waiting.again()
        pending = PendingStep(ctx, held.window, waiting, self._update.resolve)
        pending.announced = True
        ctx.batch, ctx.loss, ctx.window, ctx.pending = held.static.batch, held.loss.clone(), held.window, pending
        held.window.await_outcome(waiting.veto_flag, pending.resolve)
        self._update.await_step(pending)
        for (_, said), left in zip(self._hooks, held.left, strict=True):
            said.replayed(ctx, left)

    def _forget_latest_context(self) -> None:
        """Take the window away from whoever kept the context of a replay: the next one writes into its memory."""
        if self._latest is not None and self._latest.ctx is not None:
            self._latest.ctx.window = None
            self._latest.ctx = None

    @contextmanager
    def _aside(self, device: torch.device) -> Iterator[None]:
        """Work on a stream of our own, as the capture will: what torch sets up at the first use has to be there."""
        if device.type != "cuda":
            yield
            return
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(device).wait_stream(self._stream)


_Key = tuple[tuple[str, Hashable], ...]


@dataclass(eq=False)
class _Held:
    """A captured batch, and what is read and written when it is replayed."""

    graph: UpdateGraph
    static: StaticBatch
    waiting: Waiting
    window: UpdateWindow
    loss: Tensor
    gradients: list[tuple[Tensor, Tensor | None]]
    moment: _Moment
    left: list[Any]  # in each hook
    ctx: TrainContext | None = None  # of the latest replay


class _Moment:
    """What the host knew of a window when it was captured: nothing yet of how it ends."""

    def __init__(self, window: UpdateWindow) -> None:
        parts = [*window.parts(), *window.decision.asked]
        self._kept = [(part, _copied(vars(part))) for part in parts]

    def come_back(self) -> None:
        """Know no more than then."""
        for part, state in self._kept:
            vars(part).clear()
            vars(part).update(_copied(state))


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: type(value)(value) if type(value) in (list, dict) else value for name, value in state.items()}


def _how_it_is_replayed(hook: TrainingUpdateHook) -> tuple[TrainingUpdateHook, CapturableHook] | None:
    """Return a hook with its protocol; None if it does not act in a batch. One that acts must have it."""
    if isinstance(hook, CapturableHook):
        return hook, hook
    if acts := [method for method in _NOT_REPLAYED if overrides(hook, method)]:
        raise HookContractError(
            f"{type(hook).__name__} overrides {', '.join(acts)}, which nobody calls in a batch that is replayed; give "
            "it the methods of nvalchemi.hooks.CapturableHook, or do without capture."
        )
    return None


def _refuse_what_cannot_be_replayed(ctx: TrainContext) -> None:
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise RuntimeError("There are several ranks, which agree on every step; an update of them cannot be captured.")
    if not ctx.window_complete:
        raise RuntimeError("ctx.window_complete is False; a window of several batches cannot be captured.")
    for optimizer in ctx.optimizers:
        if obstacle := why_not_folded(optimizer, ()):
            raise RuntimeError(
                f"The step of {type(optimizer).__name__} cannot be captured: {obstacle}; give it fused=True."
            )


def _device_of(ctx: TrainContext) -> torch.device:
    for optimizer in ctx.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                return parameter.device  # type: ignore[no-any-return]
    raise RuntimeError("ctx.optimizers hold no parameter, so there is nothing to update and nothing to capture.")


def _gradients(ctx: TrainContext) -> list[tuple[Tensor, Tensor | None]]:
    groups = [group for optimizer in ctx.optimizers for group in optimizer.param_groups]
    return [(parameter, parameter.grad) for group in groups for parameter in group["params"]]


def _move_schedulers(ctx: TrainContext, schedulers: Sequence[Any], outcome: StepOutcome) -> None:
    optimizers = ctx.optimizers
    moved = [one for one, report in zip(optimizers, outcome.optimizers, strict=False) if report.stepped]
    step_schedulers(schedulers, optimizers, moved)
