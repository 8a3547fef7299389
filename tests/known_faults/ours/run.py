"""A run of a strategy with hooks by name."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nvalchemi.hooks import TrainContext
from nvalchemi.testing import VetoingHook
from nvalchemi.training import OptimizerConfig, TrainingStrategy, load_training, save_training
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator, UpdatePriority

__all__ = ["Run"]


class TorchScalerHook(TrainingUpdateHook):
    """Scales with torch's own scaler, which unscales by itself."""

    priority = UpdatePriority.SCALE
    reads_grad = False

    def __init__(self, **settings: Any) -> None:
        self.scaler = torch.amp.GradScaler("cpu", **settings)

    def before_batch(self, ctx: TrainContext, *, will_skip: bool) -> bool:
        """Publish the scaler."""
        ctx.grad_scaler = self.scaler
        return True

    def transform_loss(self, ctx: TrainContext, loss: Tensor) -> Tensor:
        """Return the scaled loss."""
        return self.scaler.scale(loss)


class Run:
    """A model in training.

    Parameters
    ----------
    model : torch.nn.Module
        What is trained; the loss is `loss` of what it returns for a batch and the batch.
    optimizer, options, scheduler
        Names in torch with their arguments; the scheduler halves the learning rate at every step.
    spread : {"one", "groups", "optimizers", "first"}
        Where the parameters are: in one group, in a group each, in an optimizer each, or the first alone in one.
    ema, clip, scale, accumulate, precision
        Arguments of the hooks of that kind; None: there is none.
    torch_scaler : dict, optional
        Arguments of torch's own scaler instead of `scale`.
    check : bool or dict
        Whether gradients that are not finite veto the step, or the arguments of the hook that does it.
    veto : sequence of int
        Batches that something else vetoes, with `veto_priority`.
    turned : bool
        Give the hooks in the opposite order.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Callable[[Any, Any], Any] = lambda predictions, batch: predictions,
        optimizer: str = "SGD",
        options: dict[str, Any] | None = None,
        scheduler: bool = False,
        spread: str = "one",
        ema: dict[str, Any] | None = None,
        clip: dict[str, Any] | None = None,
        scale: dict[str, Any] | None = None,
        torch_scaler: dict[str, Any] | None = None,
        precision: str | None = None,
        check: bool | dict[str, Any] = False,
        accumulate: dict[str, Any] | None = None,
        checkpoints: Path | None = None,
        veto: Sequence[int] = (),
        veto_priority: int = 0,
        turned: bool = False,
        hooks: Sequence[object] = (),
        **strategy: Any,
    ) -> None:
        named: list[object] = []
        for name, arguments in (("ema", ema), ("grad_clip", clip), ("loss_scaling", scale), ("grad_accum", accumulate)):
            if arguments is not None:
                named.append({name: arguments})
        if precision is not None:
            named.append({"mixed_precision": {"precision": precision}})
        if check:
            named.append({"scaler_veto": check if isinstance(check, dict) else {}})
        if torch_scaler is not None:
            named.append(TorchScalerHook(**torch_scaler))
        if checkpoints is not None:
            named.append({"checkpoint": {"root": checkpoints, "every_steps": 1, "asynchronous": False}})
        if veto:
            named.append(VetoingHook(*veto, priority=veto_priority))
        skip_what_is_missing([*hooks, *named])
        named = [*hooks, *(reversed(named) if turned else named)]
        config = partial(
            OptimizerConfig,
            optimizer_cls=optimizer,
            optimizer_kwargs=options or {"lr": 1.0},
            **({"scheduler_cls": "StepLR", "scheduler_kwargs": {"step_size": 1, "gamma": 0.5}} if scheduler else {}),
        )
        self.checkpoints = checkpoints
        self.live = model  # with its wrappers, if it came with any
        self.strategy = TrainingStrategy(
            models=model,
            optimizer_configs={"main": [config(parameters=one) for one in _spread(model, spread)]},
            loss_fn=loss,
            **{"hooks": named, "num_epochs": 1, "progress": False, **strategy},
        )
        self.norm = float("nan")

    def step(self, batch: Any) -> TrainContext:
        """Train on a batch."""
        return self.strategy.train_batch(batch)

    def epoch(self, batches: Iterable[Any]) -> None:
        """Train on a pass over batches."""
        self.strategy.run(batches)

    def hook(self, name: str) -> Any:
        """Return the update hook of a name."""
        return next(hook for hook in self.strategy.orchestrator.iter_hooks() if hook.name == name)

    @property
    def shadow(self) -> nn.Module:
        """The averaged model."""
        return self.hook("ema").get_averaged_model().module

    @property
    def updates(self) -> int:
        """Updates of the average."""
        self.strategy.orchestrator.resolve()
        return self.hook("ema").num_updates

    def average_of(self, name: str) -> float:
        """Return an averaged parameter; a state that was loaded waits for the setup."""
        self.strategy.setup()
        return self.shadow.get_parameter(name).item()

    def prime_average(self) -> None:
        """Let the average begin with the weights as they are."""
        self.strategy.setup()
        self.hook("ema").after_optimizer_step(TrainContext(models=self.strategy.models, step_count=0), skipped=False)

    def wrap(self, wrapper: Callable[[nn.Module], nn.Module]) -> None:
        """Wrap the model in the middle of a run."""
        self.strategy.models["main"] = wrapper(self.strategy.models["main"])

    def evaluate(self, batches: list[Any]) -> float:
        """Return the loss of the averaged weights."""
        return self.strategy.validate(batches, weights="averaged")["loss"]

    @property
    def norm_before_clipping(self) -> float:
        """The norm that the clip hook saw."""
        return self.hook("grad_clip").last_norm

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """What steps."""
        self.strategy.setup()
        return self.strategy.optimizers

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.optimizers[0].param_groups[0]["lr"]

    @property
    def scale(self) -> float:
        """The loss scale of the next batch."""
        self.strategy.orchestrator.resolve()
        scalers = (getattr(hook, "scaler", None) for hook in self.strategy.orchestrator.iter_hooks())
        return next(scaler.get_scale() for scaler in scalers if scaler is not None)

    @property
    def steps(self) -> int:
        """Executed steps."""
        return self.strategy.step_count

    @property
    def batches(self) -> int:
        """Batches, with or without a step."""
        return self.strategy.batch_count

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        save_training(path, self.strategy)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint, or from the latest of those that the run keeps there."""
        kept = sorted(path.glob("step-*"))
        load_training(kept[-1] if kept else path, self.strategy)

    def finish(self) -> None:
        """Wait for what is still under way."""
        self.strategy.registry.close()

    def pickled(self) -> bytes:
        """Return the update hooks, pickled."""
        return pickle.dumps(self.strategy.orchestrator)

    @staticmethod
    def order(hooks: Iterable[TrainingUpdateHook]) -> list[TrainingUpdateHook]:
        """Return hooks in the order in which they are called."""
        return list(TrainingUpdateOrchestrator(*hooks).iter_hooks())


def skip_what_is_missing(named: Iterable[object]) -> None:
    """Skip a test whose hooks are not all installed: the environment of one plugin tests what that plugin takes."""
    for name in (name for one in named if isinstance(one, Mapping) for name in one):
        plugin = {"loss_scaling": "loss-scaling", "mixed_precision": "loss-scaling"}.get(name, name.replace("_", "-"))
        try:
            distribution(f"nvalchemi-hooks-{plugin}")
        except PackageNotFoundError:
            pytest.skip(f"nvalchemi-hooks-{plugin} is not installed")


def _spread(model: nn.Module, how: str) -> list[Callable[[nn.Module], Any]]:
    if how == "optimizers":
        return [lambda model, name=name: [model.get_parameter(name)] for name, _ in model.named_parameters()]
    if how == "groups":
        return [lambda model: [{"params": [parameter]} for parameter in model.parameters()]]
    if how == "first":
        return [lambda model: [next(model.parameters())]]
    return [lambda model: model.parameters()]
