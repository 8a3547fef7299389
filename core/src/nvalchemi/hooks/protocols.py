"""Everything the core may call on a hook. Nothing else is ever looked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nvalchemi.training.hooks.plan import OptimizerPlan


__all__ = [
    "CheckpointableHook",
    "Closable",
    "Enterable",
    "GradientScaler",
    "Hook",
    "LooksAhead",
    "PreparesLoader",
    "ProvidesAveragedModel",
    "ProvidesExecutor",
    "ProvidesInferenceContext",
    "RunsOnStage",
    "UpdateExecutor",
]


@runtime_checkable
class Hook(Protocol):
    """Anything an engine calls at a stage.

    Attributes
    ----------
    frequency : int
        1 runs at every dispatch; `n` runs when ``ctx.step_count % n == 0``, once per value of ``step_count`` and stage.
    stage : Enum or None
        Where it runs. None means that the hook says so itself, through ``_runs_on_stage`` (`RunsOnStage`).

    Examples
    --------
    >>> from nvalchemi.training.stages import TrainingStage
    >>> class PrintLoss:
    ...     frequency = 10
    ...     stage = TrainingStage.AFTER_BATCH
    ...     def __call__(self, ctx, stage):
    ...         print(f"step {ctx.step_count}: loss {ctx.loss:.3f}")
    >>> isinstance(PrintLoss(), Hook)
    True
    """

    frequency: int
    stage: Enum | None

    def __call__(self, ctx: Any, stage: Any) -> None:
        """Do the work of `stage`."""


@runtime_checkable
class RunsOnStage(Protocol):
    """A hook of several stages: asked once for every stage, when it is registered."""

    def _runs_on_stage(self, stage: Any) -> bool: ...


@runtime_checkable
class CheckpointableHook(Protocol):
    """A hook with state that survives a checkpoint: tensors, numbers, strings, lists, tuples and dicts only."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data that later training does not change."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state; refuse one that does not fit before anything is changed."""


@runtime_checkable
class Closable(Protocol):
    """A hook that holds something to let go of when a run ends. Closing twice must be harmless.

    A hook that is to be used in a second run opens what it needs when it is called, or has `Enterable`'s methods too.
    """

    def close(self) -> None:
        """Let go."""


@runtime_checkable
class Enterable(Protocol):
    """A hook that is entered before training and exited after it, whatever raises."""

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Any: ...


@runtime_checkable
class LooksAhead(Protocol):
    """A hook that wants to know of each batch whether it is the last of its pass: ``ctx.is_last_batch``.

    A loader need not know its length, so the strategy fetches one batch ahead if any hook asks for it. That costs the
    memory of a batch. Looked up once, when the strategy is made.

    Attributes
    ----------
    looks_ahead : bool
        True asks for it.

    Examples
    --------
    >>> from nvalchemi.training.stages import TrainingStage
    >>> class Announce:
    ...     frequency, stage, looks_ahead = 1, TrainingStage.BEFORE_BATCH, True
    ...     def __call__(self, ctx, stage):
    ...         if ctx.is_last_batch:
    ...             print("the last one")
    >>> isinstance(Announce(), LooksAhead)
    True
    """

    looks_ahead: bool


@runtime_checkable
class PreparesLoader(Protocol):
    """A hook that chooses what this process sees of the data, one rank among several for example.

    A strategy asks it at the beginning of a run and before validation; what was evaluated is then added up over ranks.
    """

    def prepare_loader(self, loader: Any, *, training: bool) -> Iterable[Any]:
        """Return what to iterate in place of `loader`, which may be `loader` itself; asked again, the same."""


@runtime_checkable
class ProvidesAveragedModel(Protocol):
    """A hook that keeps an averaged copy of a model, which validation may evaluate.

    Attributes
    ----------
    model_key : str
        Which of the context's models is averaged.
    """

    model_key: str

    def get_averaged_model(self) -> torch.optim.swa_utils.AveragedModel:
        """Return the averaged model; raise ``RuntimeError`` before it is built."""


@runtime_checkable
class ProvidesInferenceContext(Protocol):
    """A hook whose precision also holds where nothing is trained: validation runs inside its context."""

    def inference_context(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a fresh context for one evaluation on `device`, autocast for example."""


@runtime_checkable
class GradientScaler(Protocol):
    """A loss scaler whose unscaling can be folded into the update, and whose window the orchestrator closes.

    Whoever scales the loss does so with `scale`; gradients are then divided by `divisor`, once. A scaler without this
    protocol is driven through the public interface of ``torch.amp.GradScaler``.

    A scaler that never scales by more than some number may say so in an attribute ``largest_scale`` (by default 2**64):
    a step that is decided on the device then needs fewer checks.
    """

    def is_enabled(self) -> bool:
        """Return whether it scales at all."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss, scaled."""

    def divisor(self, device: torch.device) -> Tensor:
        """Return the scale of this window as a 0-dim float32 tensor on `device`.

        At most 2**64, so that its product with a clipping factor fits float32.
        """

    def close(self, found_inf: bool | Tensor | None) -> None:
        """End the window, exactly once: back off (True), count a good step (False), or stay as it is (None).

        In lazy mode it is told by a tensor: float32, 0-dim, exactly 1 (back off) or 0 (a good step).
        """


@runtime_checkable
class UpdateExecutor(Protocol):
    """Who carries out the step of one optimizer, in as few passes over memory as it can.

    It must give what ``optimizer.step()`` gives on divided gradients, to the rounding it documents, and keep the
    optimizer's own state: step counters and moments stay where a checkpoint looks for them. What a plan divides out it
    leaves in ``.grad``, where ``ctx.gradients`` still finds it. An optimizer is stepped by others only if nobody has
    hooked into its ``step()``.
    """

    def execute(self, plan: OptimizerPlan) -> bool:
        """Carry out the whole plan and return True, or change nothing and return False: the next one is asked."""


@runtime_checkable
class ProvidesExecutor(Protocol):
    """An update hook that brings an executor; it is asked once, when it is composed, before the core's own."""

    def update_executor(self) -> UpdateExecutor:
        """Return the executor."""
