"""A loss scale that never changes, for checks that hooks see true gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nvalchemi.training.hooks import TrainingUpdateHook, UpdatePriority

if TYPE_CHECKING:
    from torch import Tensor

    from nvalchemi.hooks import TrainContext

__all__ = ["FixedScaleHook"]


class FixedScaleHook(TrainingUpdateHook):
    """Scales the loss by a constant; gradients are divided by it, where that can be inside the optimizer's own pass."""

    priority = UpdatePriority.SCALE - 1  # before a hook under test that scales, or acts on true gradients
    reads_grad = False

    def __init__(self, factor: float) -> None:
        self.scaler = _FixedScaler(factor)

    def before_batch(self, ctx: TrainContext, *, will_skip: bool) -> bool:
        """Publish the scaler."""
        ctx.grad_scaler = self.scaler
        return True

    def transform_loss(self, ctx: TrainContext, loss: Tensor) -> Tensor:
        """Return the loss, scaled."""
        return self.scaler.scale(loss)


class _FixedScaler:
    """A `nvalchemi.hooks.GradientScaler` that neither grows nor backs off."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def is_enabled(self) -> bool:
        return True

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.factor

    def divisor(self, device: torch.device) -> Tensor:
        return torch.tensor(self.factor, device=device)

    def close(self, found_inf: bool | None) -> None:
        pass
