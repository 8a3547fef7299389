"""Hooks for tests: one that writes down, one that vetoes, one that fails, one that accumulates, one that scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook, UpdatePriority

if TYPE_CHECKING:
    from torch import Tensor

    from nvalchemi.hooks import TrainContext

__all__ = ["AccumulatingHook", "FailingHook", "LossFactorHook", "RecordingHook", "VetoingHook"]


class RecordingHook(TrainingUpdateHook):
    """Writes down every call, and what became of the step.

    Parameters
    ----------
    label : str
        Its name in the record.
    calls : list, optional
        Where it writes; several may share one, and then it shows who was called when.
    priority : int
        When it is called among the others.
    answers : mapping of str to bool, optional
        What it answers at a stage, by the stage's name; True elsewhere.

    Attributes
    ----------
    calls : list of (label, stage, told)
        The stage by name, or ``"settled"``; and whether the hook was told that the step would be, or was, skipped.

    Examples
    --------
    >>> from nvalchemi.testing import tiny_batches, tiny_strategy
    >>> hook = RecordingHook(answers={"DO_OPTIMIZER_STEP": False})
    >>> _ = tiny_strategy(hook).train_batch(tiny_batches()[0])
    >>> hook.calls[-2:]
    [('recording', 'AFTER_OPTIMIZER_STEP', True), ('recording', 'settled', True)]
    """

    reads_grad = False

    def __init__(
        self,
        label: str = "recording",
        calls: list[tuple[str, str, bool]] | None = None,
        *,
        priority: int = UpdatePriority.DEFAULT,
        answers: Mapping[str, bool] | None = None,
    ) -> None:
        self.labelled(label)
        self.calls = [] if calls is None else calls
        self.priority = priority  # type: ignore[misc]  # an instance may have its own
        self.answers = dict(answers or {})

    def __call__(self, ctx: TrainContext, stage: TrainingStage, will_skip: bool = False) -> tuple[bool, Tensor | None]:
        """Write down the call and give the answer."""
        self.calls.append((self.state_key, stage.name, will_skip))
        return self.answers.get(stage.name, True), ctx.loss

    def settled(self, ctx: TrainContext, *, skipped: bool) -> None:
        """Write down what became of the step."""
        self.calls.append((self.state_key, "settled", skipped))


class VetoingHook(TrainingUpdateHook):
    """Vetoes the optimizer step of given batches, or of all.

    Parameters
    ----------
    *batches : int
        Their numbers (``ctx.batch_count``, from 0); none given: every batch.
    priority : int
        By default it votes before everybody else.

    Examples
    --------
    >>> from nvalchemi.testing import tiny_batches, tiny_strategy
    >>> strategy = tiny_strategy(VetoingHook(0, 2))
    >>> [strategy.train_batch(batch).step_skipped for batch in tiny_batches(4)]
    [True, False, True, False]
    """

    reads_grad = False

    def __init__(self, *batches: int, priority: int = 0) -> None:
        self.batches = batches
        self.priority = priority  # type: ignore[misc]  # an instance may have its own

    def before_optimizer_step(self, ctx: TrainContext, *, will_skip: bool) -> bool:
        """Veto the batches that were given."""
        if self.batches and ctx.batch_count not in self.batches:
            return True
        ctx.note_veto(f"a test vetoes batch {ctx.batch_count}")
        return False


class FailingHook:
    """A plain hook that raises at one stage of one batch.

    Parameters
    ----------
    error : BaseException
        What it raises.
    stage : TrainingStage
        Where.
    at : int
        The ``ctx.batch_count`` from which on it is due; it raises once.

    Examples
    --------
    >>> from nvalchemi.testing import tiny_batches, tiny_strategy
    >>> strategy = tiny_strategy(FailingHook(KeyError("mine"), at=2))
    >>> try:
    ...     strategy.run(tiny_batches())
    ... except KeyError as error:
    ...     print(repr(error), strategy.batch_count)
    KeyError('mine') 2
    """

    frequency = 1

    def __init__(self, error: BaseException, *, stage: TrainingStage = TrainingStage.AFTER_BATCH, at: int = 0) -> None:
        self.stage = stage
        self.at = at
        self.pending: BaseException | None = error

    def __call__(self, ctx: TrainContext, stage: TrainingStage) -> None:
        """Raise, once."""
        if self.pending is not None and ctx.batch_count >= self.at:
            error, self.pending = self.pending, None
            raise error


class AccumulatingHook(TrainingUpdateHook):
    """Keeps gradients over `every` batches; their sum is stepped.

    Examples
    --------
    >>> from nvalchemi.testing import tiny_batches, tiny_strategy
    >>> strategy = tiny_strategy(AccumulatingHook(every=2))
    >>> strategy.run(tiny_batches(4))
    >>> strategy.step_count
    2
    """

    reads_grad = False

    def __init__(self, every: int, *, priority: int = UpdatePriority.ACCUMULATE) -> None:
        self.every = every
        self.priority = priority  # type: ignore[misc]  # an instance may have its own
        self.seen = 0

    def before_batch(self, ctx: TrainContext, *, will_skip: bool) -> bool:
        """Say whether the window is complete; only its first batch has the gradients zeroed."""
        self.seen += 1
        ctx.window_complete = self.seen % self.every == 0
        return (self.seen - 1) % self.every == 0


class LossFactorHook(TrainingUpdateHook):
    """Multiplies the loss.

    Examples
    --------
    >>> import torch
    >>> LossFactorHook(0.5).transform_loss(None, torch.tensor(3.0))
    tensor(1.5000)
    """

    reads_grad = False

    def __init__(self, factor: float, *, priority: int = UpdatePriority.DEFAULT) -> None:
        self.factor = factor
        self.priority = priority  # type: ignore[misc]  # an instance may have its own

    def transform_loss(self, ctx: TrainContext, loss: Tensor) -> Tensor:
        """Return the loss times the factor."""
        return loss * self.factor
