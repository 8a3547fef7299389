"""The training loop, and only the loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from nvalchemi.errors import NoProgressError
from nvalchemi.hooks.context import TrainContext
from nvalchemi.hooks.protocols import LooksAhead, PreparesLoader, ProvidesAveragedModel, ProvidesInferenceContext
from nvalchemi.training.arguments import (
    checked_callable,
    checked_length,
    checked_models,
    chosen_device,
    global_rank,
    length_of,
    why_no_batches,
)
from nvalchemi.training.assembly import assemble
from nvalchemi.training.batches import move_to, scalar_loss
from nvalchemi.training.hook_states import HookStates
from nvalchemi.training.hooks.orchestrator import TrainingUpdateOrchestrator
from nvalchemi.training.look_ahead import Batches
from nvalchemi.training.modes import evaluation_mode, training_modes
from nvalchemi.training.optimizers import OptimizerConfig, checked_optimizer_configs
from nvalchemi.training.position import DataPosition
from nvalchemi.training.progress import RunProgress
from nvalchemi.training.ranks_alike import refuse_other_hooks, refuse_other_lengths, refuse_other_places
from nvalchemi.training.rng import random_numbers_kept
from nvalchemi.training.sharding import has_shards
from nvalchemi.training.stages import TrainingStage
from nvalchemi.training.step_count import StepCount
from nvalchemi.training.strategy_state import load_into, state_of
from nvalchemi.training.tally import Tally
from nvalchemi.training.unwrap import bare_module, unreplicated
from nvalchemi.training.validation import (
    Validation,
    ValidationResult,
    Weights,
    averaged_module,
    checked_weights,
    evaluate,
)

__all__ = ["TrainingStrategy"]


class TrainingStrategy:
    """Trains models, with hooks at every stage of `TrainingStage`.

    Parameters
    ----------
    models : torch.nn.Module or mapping of str to torch.nn.Module
        A module alone is the model ``"main"``. Models without an optimizer are frozen and in eval mode during `run`.
    optimizer_configs : OptimizerConfig, or mapping of str to OptimizerConfig or a list of them
        What trains each model; one alone trains ``"main"``.
    loss_fn : callable
        ``loss_fn(predictions, batch)`` gives a scalar tensor, or named scalars of which ``"loss"`` (or else the sum) is
        trained on.
    training_fn : callable, optional
        ``training_fn(model, batch)`` gives predictions; with several models it gets the dict of all. By default the
        main model is called with the batch.
    num_epochs, num_steps : int, optional
        Passes over the loader, or executed optimizer steps, that one `run` is for; exactly one of the two.
    hooks : str, sequence or mapping
        Names of installed hooks, ``{name: arguments}``, hook objects, a mapping from labels to any of these, or
        ``"auto"``: every installed hook that can do without arguments.
    priorities : mapping of str to int, optional
        Other priorities of update hooks, by `state_key`.
    devices : device, or sequence of devices, optional
        Where to train; of several each rank takes its own. By default the models stay where they are.
    validation : Validation, optional
        What to validate on, and how often.
    progress : bool, optional
        Show a progress bar on standard error; by default when it is a terminal.
    lazy : bool
        Do not wait for the device to say whether a step was taken; see `TrainingUpdateOrchestrator`.

    Attributes
    ----------
    models : dict of str to torch.nn.Module
        As they are trained; a hook may have wrapped them at SETUP.
    orchestrator : TrainingUpdateOrchestrator
        The update hooks, composed.
    batch_count, epoch_step_count, epoch : int
        Batches in all and in this epoch; epochs that have ended.

    Raises
    ------
    ValueError, TypeError
        An argument does not fit: the message names it, its value and the remedy.

    Examples
    --------
    >>> model = nn.Linear(1, 1)
    >>> strategy = TrainingStrategy(
    ...     models=model, optimizer_configs=OptimizerConfig(optimizer_kwargs={"lr": 0.1}), num_epochs=2,
    ...     training_fn=lambda model, batch: model(batch[0]),
    ...     loss_fn=lambda predictions, batch: (predictions - batch[1]).square().mean())
    >>> strategy.run([(torch.ones(4, 1), torch.zeros(4, 1))])
    >>> strategy.step_count
    2
    """

    def __init__(
        self,
        *,
        models: nn.Module | Mapping[str, nn.Module],
        optimizer_configs: OptimizerConfig | Mapping[str, OptimizerConfig | Sequence[OptimizerConfig]],
        loss_fn: Callable[[Any, Any], Any],
        training_fn: Callable[[Any, Any], Any] | None = None,
        num_epochs: int | None = None,
        num_steps: int | None = None,
        hooks: object = (),
        priorities: Mapping[str, int] | None = None,
        devices: Any = None,
        validation: Validation | None = None,
        progress: bool | None = None,
        lazy: bool = False,
    ) -> None:
        self.models = checked_models(models)
        self.optimizer_configs = checked_optimizer_configs(optimizer_configs, self.models)
        self.loss_fn = checked_callable("loss_fn", loss_fn)
        self.training_fn = None if training_fn is None else checked_callable("training_fn", training_fn)
        self.num_epochs, self.num_steps = checked_length(num_epochs, num_steps)
        if validation is not None and not isinstance(validation, Validation):
            raise TypeError(f"validation is a {type(validation).__name__}; give Validation(loader=...).")
        self.validation = validation
        self.progress = progress
        self._assembly = assemble(hooks, priorities, lazy=lazy)
        self.registry = self._assembly.registry
        self.orchestrator: TrainingUpdateOrchestrator = self._assembly.orchestrator
        self.devices = devices
        if devices is not None:
            chosen_device(devices, self.models)  # a wrong one is found now, not at the first batch
        self._optimizers: list[torch.optim.Optimizer] = []
        self._lr_schedulers: list[Any] = []
        self._steps = StepCount()
        self.batch_count = self.epoch_step_count = self.epoch = 0
        self.validation_result: ValidationResult | None = None
        self._goal: int | None = None  # of the run that is under way, or was interrupted
        self._validated_at: int | None = None
        self._position = DataPosition(
            validation.loader if validation is not None else None,
            looks_ahead=any(hook.looks_ahead for hook in self._assembly.providers(LooksAhead)),
        )
        self._is_set_up = False

    @property
    def hooks(self) -> tuple[Any, ...]:
        """All hooks in the order in which they were given, by name or as objects."""
        return tuple(one.hook for one in self._assembly.activated)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Built once, before the first batch; a pending step is resolved, so that learning rates are exact."""
        self.orchestrator.resolve()
        return self._optimizers

    @property
    def lr_schedulers(self) -> list[Any]:
        """Built with the optimizers; a pending step is resolved."""
        self.orchestrator.resolve()
        return self._lr_schedulers

    @property
    def step_count(self) -> int:
        """Executed optimizer steps of this process; a pending step is resolved."""
        return self._steps.exact()

    @property
    def global_step_count(self) -> int:
        """Executed optimizer steps, counted once for every rank; a pending step is resolved."""
        self._steps.exact()
        return self._steps.known_globally

    @property
    def is_sharded(self) -> bool:
        """Whether models are spread over ranks, so that every rank takes part in a save."""
        return has_shards(map(bare_module, self.models.values()))

    def run(self, loader: Iterable[Any]) -> None:
        """Train for `num_epochs` or `num_steps`; a run that was interrupted is finished, a finished one goes on.

        A run whose state was loaded goes on with the batch that would have come next: the pass is begun with the random
        numbers it began with, and the batches that were trained on are passed over.

        Parameters
        ----------
        loader : iterable
            The batches of one epoch.

        Raises
        ------
        ValueError
            The loader gave no batches, or fewer than the loaded state was trained on in this pass.
        NoProgressError
            A ``RuntimeError``: a whole pass over the loader without one optimizer step; it names who vetoed.
        """
        if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
            raise TypeError(
                f"run(loader) got a {type(loader).__name__} ({loader!r}); give a list of batches or a DataLoader."
            )
        self.setup()
        loader = self._part_of(loader, training=True)
        refuse_other_lengths(loader)
        if self._goal is None:
            self._goal = self._done() + (self.num_steps or self.num_epochs or 0)
        refuse_other_places(step=self.step_count, batch=self.batch_count, epoch=self.epoch, goal=self._goal)
        with ExitStack() as stack:
            stack.enter_context(training_modes(self.models, self.optimizer_configs))
            stack.enter_context(self.registry)
            progress = stack.enter_context(self._progress(loader))
            self._dispatch(TrainingStage.BEFORE_TRAINING)
            stack.callback(self._position.leave)
            self._position.enter(loader)
            while self._position.resumes or not self._is_done():
                self._run_epoch(loader, progress)
            self.orchestrator.resolve()
            self._dispatch(TrainingStage.AFTER_TRAINING)
        self._goal = None

    def train_batch(self, batch: Any, *, is_last_batch: bool = False) -> TrainContext:
        """Take one batch through every stage from BEFORE_BATCH to AFTER_BATCH.

        Parameters
        ----------
        batch : Any
            A tensor, a mapping or sequence of batches, or an object with ``.to(device)``.
        is_last_batch : bool
            No other batch follows in this pass: what was accumulated is stepped with it.

        Returns
        -------
        TrainContext
            What happened: ``loss`` (detached), ``step_skipped``, ``outcome``.
        """
        self.setup()
        batch = move_to(batch, self.device)
        dispatch = self.registry.dispatch
        with self._position.batch(), self._context(batch) as ctx:
            ctx.is_last_batch = is_last_batch
            dispatch(ctx, TrainingStage.BEFORE_BATCH)
            dispatch(ctx, TrainingStage.BEFORE_FORWARD)
            predictions = self._predict(ctx.models, batch)
            dispatch(ctx, TrainingStage.AFTER_FORWARD)
            dispatch(ctx, TrainingStage.BEFORE_LOSS)
            ctx.loss, ctx.losses = scalar_loss(self.loss_fn(predictions, batch), training=True)
            loss = ctx.loss.detach()
            del predictions
            dispatch(ctx, TrainingStage.AFTER_LOSS)
            dispatch(ctx, TrainingStage.BEFORE_BACKWARD)
            dispatch(ctx, TrainingStage.DO_BACKWARD)
            ctx.let_go_of_graph()
            ctx.loss = loss  # also where a plain hook owns the slot
            dispatch(ctx, TrainingStage.AFTER_BACKWARD)
            dispatch(ctx, TrainingStage.BEFORE_OPTIMIZER_STEP)
            dispatch(ctx, TrainingStage.DO_OPTIMIZER_STEP)
            try:
                dispatch(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
            finally:
                self._count(ctx)  # the step was taken, whatever a hook says to it
            dispatch(ctx, TrainingStage.AFTER_BATCH)
        return ctx

    def validate(self, loader: Iterable[Any] | None = None, *, weights: Weights | None = None) -> ValidationResult:
        """Evaluate the models on held-out batches; weights are never swapped, the averaged module is evaluated itself.

        Parameters
        ----------
        loader : iterable, optional
            The batches; by default those of `validation`.
        weights : {"auto", "live", "averaged"}, optional
            Which weights; by default those of `validation`. Before the first average the live ones are evaluated.

        Returns
        -------
        ValidationResult
            Mean losses by name, and which weights they belong to.

        Raises
        ------
        ValueError
            There is no loader, or it is empty.
        """
        result = self._evaluate(loader, weights)
        self._dispatch(TrainingStage.AFTER_VALIDATION)
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the run is made of, as plain data on the host that later training does not change.

        It builds no model and draws no random number.

        Returns
        -------
        dict
            ``"models"``, ``"optimizers"``, ``"schedulers"``, ``"hooks"`` (by `state_key`, with class, distribution and
            version), ``"run"`` (counters and goal), ``"position"`` (random numbers and place in the data), and
            ``"gradients"`` and ``"window_open"`` where the latest batch made no step.

        Raises
        ------
        RuntimeError
            It was asked for inside a batch, before AFTER_BATCH.
        HookConflictError
            A ``ValueError``: two hooks with state have one key.
        """
        return state_of(self)

    def load_state_dict(self, state: Mapping[str, Any], *, fresh: Collection[str] = ()) -> None:
        """Take over a state; the next `run` goes on where it was taken, to the end of the run that was under way.

        A state that does not fit changes nothing. States of hooks that this run has not are kept for the next
        `state_dict`, with a `CheckpointWarning`.

        Parameters
        ----------
        state : mapping
            What `state_dict` returned, here or in another process.
        fresh : collection of str
            Hooks, by `state_key`, that start from scratch.

        Raises
        ------
        CheckpointMismatchError
            A ``ValueError``: models, optimizers, schedulers or hooks are not those of the state; it names which, how
            they differ, and the remedy.
        """
        load_into(self, state, fresh)

    def setup(self) -> None:
        """Settle devices, let hooks set up, build optimizers and schedulers; done by itself before the first batch."""
        if self._is_set_up:
            return
        self.device = chosen_device(self.devices, self.models)
        if self.devices is not None:
            for model in self.models.values():
                model.to(self.device)
        with self._context(None) as ctx:
            ctx.models = dict(self.models)
            self.registry.dispatch(ctx, TrainingStage.SETUP)
        refuse_other_hooks(self._assembly.named_hooks())
        built = [
            config.build(ctx.models[key], key) for key, configs in self.optimizer_configs.items() for config in configs
        ]
        self.models = dict(ctx.models)
        self._optimizers = [optimizer for optimizer, _ in built]
        self._lr_schedulers = [scheduler for _, scheduler in built if scheduler is not None]
        self._is_set_up = True

    # Inside.

    def _evaluate(self, loader: Iterable[Any] | None, weights: Weights | None) -> ValidationResult:
        self.setup()
        if loader is None:
            if self.validation is None:
                raise ValueError(
                    "There is nothing to validate on: give validate(loader), or validation=Validation(loader=...)."
                )
            loader = self.validation.loader
        models, used = self._weights(weights or (self.validation.weights if self.validation else "auto"))
        with ExitStack() as stack:
            stack.enter_context(evaluation_mode(models.values()))
            for hook in self._assembly.providers(ProvidesInferenceContext):
                stack.enter_context(hook.inference_context(self.device))
            stack.enter_context(random_numbers_kept())  # what is trained does not depend on how often it is evaluated
            part = self._part_of(loader, training=False)
            losses, batches = evaluate(
                lambda batch: self._predict(models, batch),
                self.loss_fn,
                part,
                self.device,
                over_ranks=bool(self._assembly.providers(PreparesLoader)),
            )
        self.validation_result = result = ValidationResult(losses, weights=used, batches=batches)
        for scheduler in self.lr_schedulers:
            if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                scheduler.step(result["loss"])
        return result

    def _part_of(self, loader: Iterable[Any], *, training: bool) -> Iterable[Any]:
        """Return what this process sees of a loader."""
        for hook in self._assembly.providers(PreparesLoader):
            loader = hook.prepare_loader(loader, training=training)
        return loader

    @functools.cached_property
    def _hook_states(self) -> HookStates:
        return HookStates(self._assembly.named_hooks())

    def _run_epoch(self, loader: Iterable[Any], progress: RunProgress) -> None:
        position = self._position
        if position.ended:  # a state taken at AFTER_EPOCH was loaded
            position.resume_ended(loader)
        else:
            if not self._train_pass(loader, progress):
                return
            position.all_trained()
            self._dispatch(TrainingStage.AFTER_EPOCH)
        self.epoch += 1
        position.end()
        self._validate_on(epochs=True)

    def _train_pass(self, loader: Iterable[Any], progress: RunProgress) -> bool:
        """Train on the batches of a pass; False if the goal was reached in its middle."""
        tally = Tally()
        batches = self._batches(loader)
        if self._stops_inside(loader):  # a state taken at the last step was loaded
            return False
        for batch in batches:
            self._train_and_look(batch, batches.is_last, tally, progress)
            del batch  # before the loader makes the next one
            if self._stops_inside(loader):
                return False
        if self.epoch_step_count == 0:
            raise ValueError(why_no_batches(loader, self.epoch))
        if not self._steps.reached(self._position.steps_before + 1):
            raise NoProgressError(tally.no_progress())
        return True

    def _batches(self, loader: Iterable[Any]) -> Batches:
        """Return the batches of a new pass, or those that are left of a loaded one."""
        if not self._position.resumes:
            self.epoch_step_count = 0
            self._dispatch(TrainingStage.BEFORE_EPOCH)
            return self._position.begin(loader, self.step_count)
        batches = self._position.resume(loader, self.epoch_step_count)
        self._validate_on(steps=self._position.stepped)  # the state may have been taken before it was due
        return batches

    def _stops_inside(self, loader: Iterable[Any]) -> bool:
        """Whether the goal is reached in the middle of a pass."""
        return bool(self.num_steps) and self._is_done() and self.epoch_step_count != length_of(loader)

    def _train_and_look(self, batch: Any, is_last: bool, tally: Tally, progress: RunProgress) -> None:
        ctx = self.train_batch(batch, is_last_batch=is_last)
        ctx.when_resolved(tally.count)
        plan = self.validation
        if plan is not None and plan.every_steps and self._steps.may_be_multiple_of(plan.every_steps):
            self._validate_on(steps=not ctx.step_skipped)
        progress.advance(ctx, self._done_in_bar)

    def _is_done(self) -> bool:
        if self._goal is None:
            return False
        return self._steps.reached(self._goal) if self.num_steps else self.epoch >= self._goal

    def _validate_on(self, *, steps: bool = False, epochs: bool = False) -> None:
        plan = self.validation
        if plan is None:
            return
        by_steps = steps and plan.every_steps and self.step_count % plan.every_steps == 0
        by_epochs = epochs and plan.every_epochs and self.epoch % plan.every_epochs == 0
        if (by_steps or by_epochs) and self._validated_at != self.step_count:
            self._evaluate(None, None)
            self._validated_at = self.step_count
            self._dispatch(TrainingStage.AFTER_VALIDATION)

    def _count(self, ctx: TrainContext) -> None:
        self.batch_count += 1
        self.epoch_step_count += 1
        ctx.batch_count, ctx.epoch_step_count = self.batch_count, self.epoch_step_count
        self._steps.count(ctx)
        self._position.batch_is_over()
        ctx.when_resolved(self._position.note_step)

    def _context(self, batch: Any) -> TrainContext:
        ctx = TrainContext(
            batch=batch,
            models=self.models,
            trained=self.optimizer_configs.keys(),
            optimizers=self._optimizers,
            lr_schedulers=self._lr_schedulers,
            validation=self.validation_result,
            batch_count=self.batch_count,
            epoch_step_count=self.epoch_step_count,
            epoch=self.epoch,
            device=self.device,
            global_rank=global_rank(),
            workflow=self,
        )
        self._steps.tell(ctx)
        return ctx

    def _dispatch(self, stage: TrainingStage) -> None:
        with self._context(None) as ctx:
            self.registry.dispatch(ctx, stage)

    def _predict(self, models: Mapping[str, nn.Module], batch: Any) -> Any:
        main = models["main"] if "main" in models else next(iter(models.values()))
        if self.training_fn is None:
            return main(batch)
        return self.training_fn(main if len(models) == 1 else models, batch)

    def _weights(self, wanted: Weights) -> tuple[dict[str, nn.Module], str]:
        models, used = {key: unreplicated(model) for key, model in self.models.items()}, "live"
        if checked_weights(wanted) != "live":
            averaging = self._assembly.providers(ProvidesAveragedModel)
            if wanted == "averaged" and not averaging:
                raise ValueError('weights is "averaged", but no hook keeps an average; add one, or evaluate "live".')
            for hook in averaging:
                if (module := averaged_module(hook)) is not None:
                    models[hook.model_key], used = module, "averaged"
        return models, used

    def _done(self) -> int:
        return self.step_count if self.num_steps else self.epoch

    def _progress(self, loader: Iterable[Any]) -> RunProgress:
        goal, length = self._goal or 0, length_of(loader)
        if not self.num_steps:
            goal = self.batch_count + (goal - self.epoch) * (length or 0)
        shown = self.progress if global_rank() == 0 else False
        return RunProgress(goal or None, self._done_in_bar(), shown)

    def _done_in_bar(self) -> int:
        return self.step_count if self.num_steps else self.batch_count
