"""One update of many weights, three times: naive with torch's own parts, with our hooks, and what both are given.

An update is what happens from gradients that carry a loss scale to weights, moments and average after the step:
unscale, look for inf, clip, AdamW, average. Gradients are prepared before it, and are no part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nvalchemi.hooks import TrainContext
from nvalchemi.training import EMAHook, GradientClipHook, GradScalerVetoHook, LossScalingHook, TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator
from rows.timing import Contestant

__all__ = ["MAX_NORM", "DECAY", "Naive", "Ours", "Update", "four", "updates"]

MAX_NORM, DECAY = 1.0, 0.999


def four() -> list[TrainingUpdateHook]:
    """Return loss scaling, scaler veto, clipping and EMA."""
    return [LossScalingHook(), GradScalerVetoHook(), GradientClipHook(max_norm=MAX_NORM), EMAHook(decay=DECAY)]


class _Prepared(torch.autograd.Function):
    """A loss whose gradients are given; whatever it is multiplied with, they are."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Any:
        return None, *torch._foreach_mul(ctx.gradients, factor)


class _Layer(nn.Module):
    """Two parameters, as a linear layer has: what walks over a model finds modules."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)


class Update:
    """Weights of given sizes, their gradients, and an AdamW.

    Parameters
    ----------
    tensors, elements : int
        How many parameters, an even number, and the size of each.
    device : torch.device or str
        Where.
    dtype : torch.dtype
        Of the weights.
    fused : bool
        Which AdamW; False is torch's foreach form.
    """

    def __init__(
        self,
        tensors: int,
        elements: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        fused: bool = True,
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)
        numbers = torch.randn(elements, device=device, generator=generator).to(dtype)
        rolled = [numbers.roll(shift) for shift in range(2 * tensors)]  # drawing as many takes longer than an update
        self.model = nn.Sequential(*map(_Layer, rolled[:tensors:2], rolled[1:tensors:2]))
        self.weights = list(self.model.parameters())
        self.gradients = rolled[tensors:]
        self.optimizer = torch.optim.AdamW(self.weights, fused=fused, foreach=not fused)
        self.device = torch.device(device)

    def loss(self) -> Tensor:
        """Return a loss with the prepared gradients."""
        return _Prepared.apply(self.gradients, *self.weights)

    def prepare(self) -> None:
        """Put scaled gradients in place."""
        raise NotImplementedError

    def update(self) -> None:
        """Do what is measured."""
        raise NotImplementedError

    def averages(self) -> list[Tensor]:
        """Return the averaged weights."""
        raise NotImplementedError

    def step(self) -> None:
        """Do both."""
        self.prepare()
        self.update()


class Naive(Update):
    """GradScaler, ``clip_grad_norm_``, AdamW, AveragedModel, one after the other, as torch's documentation has them."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.scaler = torch.amp.GradScaler(self.device.type)
        self.averaged = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))

    def prepare(self) -> None:
        """Put scaled gradients in place."""
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss()).backward()

    def update(self) -> None:
        """Unscale, clip, step, average."""
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.averaged.update_parameters(self.model)

    def averages(self) -> list[Tensor]:
        """Return the averaged weights."""
        return list(self.averaged.module.parameters())


class Ours(Update):
    """All four plugins in an orchestrator, and further hooks."""

    def __init__(self, *sizes: int, more: Callable[[], list[Any]] = list, lazy: bool = False, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.hooks = [*four(), *more()]
        self.orchestrator = TrainingUpdateOrchestrator(*self.hooks, lazy=lazy)
        self.steps = 0
        self._batch = ExitStack()
        with TrainContext(models={"main": self.model}) as ctx:
            self.orchestrator(ctx, TrainingStage.SETUP)

    def prepare(self) -> None:
        """Put scaled gradients in place."""
        self._batch.close()
        self.ctx = self._batch.enter_context(
            TrainContext(models={"main": self.model}, optimizers=[self.optimizer], step_count=self.steps)
        )
        self.orchestrator(self.ctx, TrainingStage.BEFORE_BATCH)
        self.ctx.loss = self.loss()
        self.orchestrator(self.ctx, TrainingStage.DO_BACKWARD)

    def update(self) -> None:
        """Two stages do all of it."""
        self.orchestrator(self.ctx, TrainingStage.DO_OPTIMIZER_STEP)
        self.orchestrator(self.ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
        self.steps += 1

    def averages(self) -> list[Tensor]:
        """Return the averaged weights."""
        return list(self.hooks[3].get_averaged_model().module.parameters())


def updates(pipeline: Update) -> Contestant:
    """Return a contestant of which only the update is timed."""

    def run(times: int) -> float:
        seconds = 0.0
        for _ in range(times):
            pipeline.prepare()
            begin = process_time()
            pipeline.update()
            seconds += process_time() - begin
        return seconds

    return run
