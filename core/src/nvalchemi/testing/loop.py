"""A loop of a user's own around an orchestrator, with gradients that the test chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator, UpdatePriority

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["UpdateLoop"]


class UpdateLoop:
    """Takes batches through an orchestrator; a gradient is chosen for each parameter, or follows from a loss.

    Parameters
    ----------
    *hooks : TrainingUpdateHook
        What is composed.
    optimizers, schedulers : sequence
        What is stepped.
    scaler : object, optional
        A loss scaler, torch's for example: the loop scales the loss with it.
    models : mapping of str to torch.nn.Module, optional
        For hooks that look at models.

    Attributes
    ----------
    update : TrainingUpdateOrchestrator
        The hooks, composed.
    steps : int
        Executed steps.

    Examples
    --------
    >>> weight = nn.Parameter(torch.zeros(2))
    >>> loop = UpdateLoop(optimizers=[torch.optim.SGD([weight], lr=1.0)])
    >>> loop.batch({weight: [3.0, torch.nan]}).step_skipped  # nobody looks for a nan
    False
    >>> weight.tolist()
    [-3.0, nan]
    """

    def __init__(
        self,
        *hooks: TrainingUpdateHook,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any] = (),
        scaler: Any = None,
        models: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self.update = TrainingUpdateOrchestrator(*hooks, *([_ScalesLoss()] if scaler is not None else []))
        self.optimizers, self.schedulers, self.scaler, self.models = optimizers, schedulers, scaler, dict(models or {})
        self.steps = 0

    def batch(self, loss: Tensor | Mapping[Tensor, Any]) -> TrainContext:
        """Do one batch.

        Parameters
        ----------
        loss : Tensor, or mapping of Tensor to array-like
            What is differentiated, or for each parameter the gradient that it gets: inf and nan as you like.

        Returns
        -------
        TrainContext
            What happened: ``step_skipped``, ``outcome``.
        """
        with TrainContext(
            models=self.models,
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            grad_scaler=self.scaler,
            step_count=self.steps,
        ) as ctx:
            self.update(ctx, TrainingStage.BEFORE_BATCH)
            ctx.loss = loss if isinstance(loss, Tensor) else _linear(loss)
            self.update(ctx, TrainingStage.DO_BACKWARD)
            self.update(ctx, TrainingStage.DO_OPTIMIZER_STEP)
            self.update(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
        self.steps += not ctx.step_skipped
        return ctx


class _ScalesLoss(TrainingUpdateHook):
    """Scales the loss with the scaler that the loop has put into the context."""

    priority = UpdatePriority.SCALE
    reads_grad = False

    def transform_loss(self, ctx: TrainContext, loss: Tensor) -> Tensor:
        scaled: Tensor = ctx.grad_scaler.scale(loss)
        return scaled


def _linear(gradients: Mapping[Tensor, Any]) -> Tensor:
    """Return a loss with these gradients; of a complex parameter it is the real part of the inner product."""
    terms = []
    for parameter, gradient in gradients.items():
        term = (parameter * torch.as_tensor(gradient, dtype=parameter.dtype).conj()).sum()
        terms.append((term.real if term.is_complex() else term).double())
    return torch.stack(terms).sum()
