"""When a run is saved: configuration, stages and state of `CheckpointHook`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from nvalchemi.training import TrainingStage
from nvalchemi_hooks_checkpoint.folder import CheckpointFolder
from nvalchemi_hooks_checkpoint.retention import Retention
from nvalchemi_hooks_checkpoint.settings import checked_choice, checked_count, checked_metric, checked_root
from nvalchemi_hooks_checkpoint.writer import Writer

if TYPE_CHECKING:
    from nvalchemi.hooks import TrainContext

__all__ = ["CheckpointHook"]

_STAGES = (
    TrainingStage.BEFORE_TRAINING,
    TrainingStage.AFTER_BATCH,
    TrainingStage.AFTER_EPOCH,
    TrainingStage.AFTER_VALIDATION,
    TrainingStage.AFTER_TRAINING,
)


class CheckpointHook:
    """Save a run while it trains: the last `keep` checkpoints and the best one.

    Each is a folder ``root/step-00000030`` of its own that `nvalchemi.training.load_training` loads. Training waits for
    a copy of the state; the copy is written by another thread. A save that is due while one is being written is copied
    and written after it. Only a third waits, so there are never more than two copies, and every save that is due is
    made.

    Only rank 0 saves, unless the models are spread over ranks: then every rank writes what it holds, in a thread of its
    own, to a file system that all ranks see, and a save that is due while one is being written waits for that one.

    A step is saved once: a batch whose step was vetoed saves nothing, and neither does one in an open window, whose
    gradients belong to a step that is still to come.

    Parameters
    ----------
    root : str or path
        The folder of the checkpoints. It must not hold those of another run; a run that goes on from a checkpoint may
        save where that one is, wherever it was moved to, or in a new folder.
    every_steps, every_epochs : int, optional
        Save after so many executed steps, epochs, or both; at least 1. An epoch that ends in an open window is saved
        after the next step.
    keep : int, optional
        How many of the last are kept, at least 1; None keeps all. An earlier one is removed when a new one is complete.
    best : str, optional
        A name in the result of validation, ``"loss"`` for example. A result that is better than all before is saved,
        and kept besides the last. nan is never better.
    best_mode : {"min", "max"}
        Which is better.
    at_end : bool
        Save the end of a run, too, unless its step is saved already: a longer run can go on from there. A run that ends
        by an error saves nothing more.
    asynchronous : bool
        If False, training waits until a checkpoint is written.
    on_error : {"raise", "warn"}
        What becomes of a write that failed, at a later save, or when the hook is closed.

    Raises
    ------
    ValueError, TypeError
        At construction: a setting does not fit.
    FileExistsError
        When training begins: `root` holds the checkpoints of another run.
    CheckpointWriteError
        An ``OSError``, at a later save or at the end: a checkpoint could not be written. Earlier ones are as they were,
        and training can go on.

    Examples
    --------
    >>> import tempfile, torch
    >>> from nvalchemi.training import OptimizerConfig, TrainingStrategy, load_training
    >>> from nvalchemi_hooks_checkpoint import latest_checkpoint
    >>> root = tempfile.TemporaryDirectory()
    >>> def strategy(num_steps):
    ...     return TrainingStrategy(
    ...         models=torch.nn.Linear(1, 1), optimizer_configs=OptimizerConfig(), num_steps=num_steps,
    ...         loss_fn=lambda predictions, batch: predictions.square().mean(),
    ...         hooks=[CheckpointHook(root=root.name, every_steps=2)])
    >>> strategy(num_steps=5).run([torch.ones(4, 1)] * 10)
    >>> latest_checkpoint(root.name).name
    'step-00000005'
    >>> longer = strategy(num_steps=8)
    >>> load_training(latest_checkpoint(root.name), longer)
    >>> longer.run([torch.ones(4, 1)] * 10)
    >>> longer.step_count
    8
    >>> root.cleanup()
    """

    name: ClassVar[str] = "checkpoint"
    frequency = 1
    stage = None

    def __init__(
        self,
        *,
        root: str | os.PathLike[str],
        every_steps: int | None = None,
        every_epochs: int | None = None,
        keep: int | None = 3,
        best: str | None = None,
        best_mode: Literal["min", "max"] = "min",
        at_end: bool = True,
        asynchronous: bool = True,
        on_error: Literal["raise", "warn"] = "raise",
    ) -> None:
        self.root = checked_root(root)
        self.every_steps = checked_count("every_steps", every_steps)
        self.every_epochs = checked_count("every_epochs", every_epochs)
        self.keep = checked_count("keep", keep)
        self.best = checked_metric(best)
        self.best_mode: str = checked_choice("best_mode", best_mode, ("min", "max"))
        self.at_end: bool = checked_choice("at_end", at_end, (True, False))
        self.asynchronous: bool = checked_choice("asynchronous", asynchronous, (True, False))
        self.on_error: str = checked_choice("on_error", on_error, ("raise", "warn"))
        if not (every_steps or every_epochs or best):
            raise ValueError(
                "CheckpointHook would save nothing while the run lasts; give every_steps, every_epochs or best."
            )
        kept = Retention(keep=self.keep, metric=self.best, mode=self.best_mode)
        writer = Writer(asynchronous=self.asynchronous)
        self._folder = CheckpointFolder(self.root, kept, writer, on_error=self.on_error)
        self._window_open = self._overdue = self._entered = False
        self._together: bool | None = None  # whether all ranks save; looked at once a run

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        return stage in _STAGES

    def __call__(self, ctx: TrainContext, stage: TrainingStage) -> None:
        """Save what is due."""
        if self._together is None or stage is TrainingStage.BEFORE_TRAINING:
            self._together = bool(getattr(ctx.workflow, "is_sharded", False))
            self._folder.together, self._folder.leads = self._together, ctx.global_rank == 0
        if ctx.global_rank != 0 and not self._together:
            return
        if stage is TrainingStage.BEFORE_TRAINING:
            self._folder.claim()  # what is wrong with it is said before any time is spent
        elif stage is TrainingStage.AFTER_BATCH:
            self._after_batch(ctx)
        elif stage is TrainingStage.AFTER_EPOCH:
            self._after_epoch(ctx)
        elif stage is TrainingStage.AFTER_TRAINING:
            if self.at_end:
                self._save(ctx)
        elif self.best is not None:
            self._after_validation(ctx, self.best)
        if not (self.asynchronous and self._entered):
            self.flush()  # outside a run nobody else would hear of a failure

    def flush(self) -> None:
        """Wait for what is still to be written.

        Raises
        ------
        CheckpointWriteError
            A write failed; with ``on_error="warn"`` this is a warning.
        """
        self._folder.flush()

    def close(self) -> None:
        """Finish what is to be written and removed; the hook can be used again."""
        self._entered = False
        self._folder.close()

    def __enter__(self) -> Self:
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:  # raised, or noted on the error that is under way
            if error is None:
                raise
            error.add_note(str(failure))

    def state_dict(self) -> dict[str, Any]:
        """Return which checkpoints there are, and how good they are."""
        return self._folder.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a record, if it is that of `root`, as far as its checkpoints are there.

        Raises
        ------
        ValueError
            It is not what `state_dict` returned; nothing is changed.
        """
        self._folder.load(state)

    def _after_batch(self, ctx: TrainContext) -> None:
        self._window_open = not ctx.window_complete
        if ctx.step_skipped:  # so it is in an open window, too
            return
        if self._overdue or (self.every_steps and ctx.step_count % self.every_steps == 0):
            self._save(ctx)
            self._overdue = False

    def _after_epoch(self, ctx: TrainContext) -> None:
        if not self.every_epochs or (ctx.epoch + 1) % self.every_epochs:
            return
        self._overdue = self._window_open
        if not self._overdue:
            self._save(ctx)

    def _after_validation(self, ctx: TrainContext, metric: str) -> None:
        result = ctx.validation or {}
        if metric not in result:
            raise ValueError(
                f"CheckpointHook: best is {metric!r}, but the validation gave {sorted(result)}; set best to one of "
                "these, or let loss_fn return it."
            )
        value = float(result[metric])
        if not self._folder.is_better(value):
            return
        if self._folder.holds(ctx.step_count):
            self._folder.mark_best(ctx.step_count, value)
        elif not self._window_open:  # after it, the weights are no longer those that were validated
            self._save(ctx, best_value=value)

    def _save(self, ctx: TrainContext, *, best_value: float | None = None) -> None:
        if ctx.workflow is None:
            raise RuntimeError(
                "CheckpointHook saves ctx.workflow, which is None; run it in a TrainingStrategy, or give TrainContext "
                "a workflow with state_dict() and load_state_dict()."
            )
        self._folder.save(ctx.workflow, ctx.step_count, best_value=best_value)
