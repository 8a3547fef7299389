"""Runs to be driven through a sequence, and what can be seen of them without asking how a step ended."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi.errors import CheckpointWarning
from nvalchemi.training import (
    EMAHook,
    GradientAccumulationHook,
    GradientClipHook,
    GradScalerVetoHook,
    LossScalingHook,
    MixedPrecisionHook,
    OptimizerConfig,
    TrainingStage,
    TrainingStrategy,
    load_training,
    save_training,
)

from .probes import Batch, Boom, Facts, Onlooker, Probe
from .settings import DTYPES, Settings, Step

LEARNING_RATES = {"sgd": 0.25, "momentum": 0.125, "adam": 0.125, "adamw": 0.125}
GAMMA, WEIGHT_DECAY = 0.9, 0.25
MAX_NORM = {"norm": 1.0, "value": 2.0, "per_optimizer": 1.0}
CLIP_VALUE = 0.75
ACCUMULATED = 2
INIT_SCALE, GROWTH_INTERVAL, MIN_SCALE, MAX_SCALE = 8.0, 2, 0.5, 64.0

Seen = dict[str, Any]


class Token:
    """Lives as long as a graph."""


class _Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, token):
        ctx.token = token
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Line(nn.Module):
    """Three numbers to train; the gradient of its output by them is the batch itself."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5, -1.5], dtype=dtype))
        self.b = nn.Parameter(torch.tensor(0.25, dtype=dtype))
        self.register_buffer("level", torch.tensor(0.0, dtype=dtype))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, batch: Batch, token: object = None) -> Tensor:
        """Return the loss."""
        if self.training:
            self.seen += 1
            self.level.mul_(0.5).add_(batch.w[0], alpha=0.5)
        loss = (_Marked.apply(self.w, token) * batch.w).sum()
        return loss if batch.b is None else loss + self.b * batch.b


def make_hooks(settings: Settings) -> dict[str, Any]:
    """Return the official hooks of a run, by the short names that settings use."""
    decay, every, start = settings.ema
    scaling = {
        "init_scale": INIT_SCALE,
        "growth_interval": GROWTH_INTERVAL,
        "min_scale": MIN_SCALE,
        "max_scale": MAX_SCALE,
    }
    clip = {"max_norm": MAX_NORM[settings.clip], "per_optimizer": settings.clip == "per_optimizer"}
    makers = {
        "ema": lambda: EMAHook(decay=decay, update_every=every, start_step=start),
        "clip": lambda: GradientClipHook(**clip, clip_value=CLIP_VALUE if settings.clip == "value" else None),
        "scaling": {
            "dynamic": lambda: LossScalingHook(**scaling),
            "static": lambda: LossScalingHook(scale=INIT_SCALE),
            "fp16": lambda: MixedPrecisionHook("fp16", **scaling),
            "bf16": lambda: MixedPrecisionHook("bf16"),
        }[settings.scaling],
        "accum": lambda: GradientAccumulationHook(steps=ACCUMULATED),
        "veto": lambda: GradScalerVetoHook(max_consecutive_skips=settings.limit),
    }
    return {name: make() for name, make in makers.items() if name in settings.hooks}


def optimizer_options(settings: Settings) -> dict[str, Any]:
    """Return the class and the arguments of every optimizer of a run."""
    options: dict[str, Any] = {"lr": LEARNING_RATES[settings.optimizer], "fused": settings.fused or None}
    kind = {"sgd": "SGD", "momentum": "SGD", "adam": "Adam", "adamw": "AdamW"}[settings.optimizer]
    if settings.optimizer == "momentum":
        options["momentum"] = 0.9
    if settings.optimizer == "adamw":
        options["weight_decay"] = WEIGHT_DECAY
    return {"optimizer_cls": kind, "optimizer_kwargs": options}


class StrategyRun:
    """A `TrainingStrategy`, the hooks of a sequence, and all that can be seen from outside.

    Attributes
    ----------
    facts : list of Facts
        Of every batch since they were taken last.
    saved : list
        States that hooks took, each with what was seen then.
    save_at : set of TrainingStage
        Where the run is saved, outside of batches.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings, self.dtype = settings, DTYPES[settings.dtype]
        self.facts: list[Facts] = []
        self.saved: list[tuple[Any, Seen]] = []
        self.save_at: set[TrainingStage] = set()
        self.tokens: list[weakref.ref[Token]] = []
        self.model = Line(self.dtype)
        self.hooks = make_hooks(settings)
        self.strategy = TrainingStrategy(
            models=self.model,
            optimizer_configs={"main": [self._config(names) for names in settings.owners]},
            training_fn=self._predict,
            loss_fn=self._loss,
            hooks=[*self.hooks.values(), Probe(settings, self.facts), Onlooker(self)],
            priorities={"probe": settings.probe_priority},
            num_epochs=1,
            progress=False,
            lazy=settings.lazy,
        )
        self.strategy.setup()
        self.optimizers = self.strategy.optimizers  # kept: asking again would have a lazy step resolved
        self._named = dict(self.model.named_parameters())

    def train(self, step: Step) -> None:
        """Train on one batch."""
        self.strategy.train_batch(Batch(step, self.dtype))

    def run(self, steps: Sequence[Step]) -> None:
        """Train on a pass over some batches."""
        self.strategy.run([Batch(step, self.dtype) for step in steps])

    def evaluate(self, step: Step, weights: str) -> tuple[float, str]:
        """Return the loss of a batch, and whose it is."""
        result = self.strategy.validate([Batch(step, self.dtype)], weights=weights)
        return result["loss"], result.weights

    def state(self) -> dict[str, Any]:
        """Return the state in memory."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            return self.strategy.state_dict()

    def keep(self) -> None:
        """Take the state, and what can be seen."""
        self.saved.append((self.state(), self.seen()))

    def load(self, state: Mapping[str, Any], fresh: Collection[str] = ()) -> None:
        """Load a state."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            self.strategy.load_state_dict(state, fresh=fresh)

    def save_on_disk(self, folder: Path) -> None:
        """Save the run."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            save_training(folder, self.strategy)

    def load_from_disk(self, folder: Path, fresh: Collection[str] = ()) -> None:
        """Load a run."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)
            load_training(folder, self.strategy, fresh=fresh)

    def keys(self) -> dict[str, str]:
        """Return the key of each official hook, by its short name."""
        return {name: hook.state_key for name, hook in self.hooks.items()}

    def seen(self) -> Seen:
        """Return every tensor as numbers; no step is resolved."""
        return {
            "live": {name: _numbers(p) for name, p in self._named.items()},
            "buffers": {name: _numbers(tensor) for name, tensor in self.model.named_buffers()},
            "moments": {
                name: self._moments(optimizer, self._named[name])
                for names, optimizer in zip(self.settings.owners, self.optimizers, strict=True)
                for name in names
            },
            "average": self._average(),
        }

    def counted(self) -> dict[str, Any]:
        """Return everything that is counted; a step that is pending is resolved."""
        strategy = self.strategy
        counted: dict[str, Any] = {
            "step_count": strategy.step_count,
            "global_step_count": strategy.global_step_count,
            "batch_count": strategy.batch_count,
            "epoch_step_count": strategy.epoch_step_count,
            "epoch": strategy.epoch,
            "schedulers": [scheduler.last_epoch for scheduler in strategy.lr_schedulers],
            "rates": [group["lr"] for optimizer in strategy.optimizers for group in optimizer.param_groups],
        }
        for name, hook in self.hooks.items():
            counted[name] = _COUNTS[name](hook)
        return counted

    def graphs(self) -> int:
        """Return how many graphs are alive, and forget those that are not."""
        self.tokens = [token for token in self.tokens if token() is not None]
        return len(self.tokens)

    def _config(self, names: Collection[str]) -> OptimizerConfig:
        return OptimizerConfig(
            **optimizer_options(self.settings),
            scheduler_cls="ExponentialLR",
            scheduler_kwargs={"gamma": GAMMA},
            parameters=lambda model: [getattr(model, name) for name in names],
        )

    def _predict(self, model: Line, batch: Batch) -> Tensor:
        if torch.is_grad_enabled():
            self.facts[-1].autocast = torch.is_autocast_enabled("cpu")
            if batch.step.fault == ("code", "forward"):
                raise Boom("forward")
        token = Token()
        self.tokens.append(weakref.ref(token))
        return model(batch, token)

    def _loss(self, predictions: Tensor, batch: Batch) -> Tensor:
        if torch.is_grad_enabled() and batch.step.fault == ("code", "loss"):
            raise Boom("loss")
        return predictions

    def _average(self) -> Seen | None:
        if "ema" not in self.hooks:
            return None
        module = self.hooks["ema"].get_averaged_model().module
        return {name: _numbers(t) for name, t in (*module.named_parameters(), *module.named_buffers())}

    def _moments(self, optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, list[float]]:
        state = optimizer.state.get(parameter, {})
        if self.settings.optimizer == "momentum":
            buffer = state.get("momentum_buffer")
            return {} if buffer is None else {"buffer": _numbers(buffer)}
        if self.settings.optimizer == "sgd":
            return {}
        zeros = [0.0] * parameter.numel()
        names = {"step": [0.0], "exp_avg": zeros, "exp_avg_sq": zeros}
        return {name: _numbers(state[name]) if name in state else none for name, none in names.items()}


_COUNTS = {
    "ema": lambda hook: {"updates": hook.num_updates, "averaged": int(hook.get_averaged_model().n_averaged)},
    "clip": lambda hook: {"clipped": hook.clipped_steps, "measured": hook.measured_steps},
    "accum": lambda hook: {"batches": hook.batches},
    "veto": lambda hook: {"in a row": hook.consecutive_skips, "in all": hook.total_skips},
    "scaling": lambda hook: _scale_of(hook.scaler),
}


def _scale_of(scaler: Any) -> dict[str, Any]:
    state = scaler and scaler.state_dict()
    return {"scale": state["scale"], "good": state.get("growth_tracker", 0)} if state else {}


def _numbers(tensor: Tensor) -> list[float]:
    return tensor.detach().reshape(-1).tolist()
