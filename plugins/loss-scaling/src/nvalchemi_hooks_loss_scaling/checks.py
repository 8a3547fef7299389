"""What the hooks of this distribution refuse: a second scaler, and parameters that contradict the precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from nvalchemi.errors import HookConflictError

if TYPE_CHECKING:
    from nvalchemi.hooks import TrainContext
    from nvalchemi_hooks_loss_scaling.scaler import LossScaler

__all__ = [
    "publish",
    "refuse_contradicting_parameters",
    "refuse_foreign_scaler",
    "refuse_half_parameters",
]


class TrainedParameter(NamedTuple):
    """A parameter that gets gradients, with the names of its model and itself."""

    model: str
    name: str
    tensor: Tensor

    def __str__(self) -> str:
        return f"parameter {self.name!r} of model {self.model!r}"


def publish(ctx: TrainContext, scaler: LossScaler, hook: object) -> None:
    """Make `scaler` the one of the context, whose window the orchestrator closes."""
    if ctx.grad_scaler is not scaler:
        refuse_foreign_scaler(ctx, scaler, hook)
        ctx.grad_scaler = scaler


def refuse_foreign_scaler(ctx: TrainContext, scaler: LossScaler | None, hook: object) -> None:
    """Refuse a context whose loss somebody else scales already.

    Raises
    ------
    HookConflictError
        A ``ValueError`` that names the hook and the other scaler.
    """
    other = ctx.grad_scaler
    if other is not None and other is not scaler:
        own = type(scaler).__name__ if scaler is not None else "no scaler"
        raise HookConflictError(
            f"{type(hook).__name__} trains with {own}, but ctx.grad_scaler is a {type(other).__name__} already, and "
            f"one loss has one scale; leave out the {type(other).__name__}, or leave out {type(hook).__name__}."
        )


def refuse_half_parameters(models: Mapping[str, nn.Module], hook: object) -> None:
    """Refuse fp16 parameters where the loss is scaled: gradients have their dtype, and would be unscaled in fp16.

    Raises
    ------
    ValueError
        Names the first such parameter and its model. A frozen parameter gets no gradient and is left alone.
    """
    half = _first_trained(models, torch.float16)
    if half is not None:
        raise ValueError(
            f"{type(hook).__name__} scales the loss, but {half} is in fp16, so its gradients would be unscaled in fp16 "
            "and lost; keep parameters in fp32 (model.float()) and let autocast run the forward in fp16."
        )


def refuse_contradicting_parameters(models: Mapping[str, nn.Module], precision: torch.dtype, hook: object) -> None:
    """Refuse parameters in the other half precision, and models on which autocast would do nothing.

    Raises
    ------
    ValueError
        Names the first such parameter and its model.
    """
    other = _first_trained(models, torch.float16 if precision == torch.bfloat16 else torch.bfloat16)
    if other is not None:
        raise ValueError(
            f"{type(hook).__name__} trains in {precision}, but {other} is in {other.tensor.dtype}; keep parameters in "
            "fp32 (model.float()) and let autocast cast them."
        )
    parameters = list(_trained(models))
    if parameters and all(parameter.tensor.dtype == torch.float64 for parameter in parameters):
        raise ValueError(
            f"{type(hook).__name__} trains in {precision}, but every trained parameter, from {parameters[0]} on, is in "
            "float64, which autocast leaves as it is; use model.float(), or precision 'fp32', which changes nothing."
        )


def _first_trained(models: Mapping[str, nn.Module], dtype: torch.dtype) -> TrainedParameter | None:
    return next((parameter for parameter in _trained(models) if parameter.tensor.dtype == dtype), None)


def _trained(models: Mapping[str, nn.Module]) -> Iterator[TrainedParameter]:
    for key, model in models.items():
        for name, tensor in model.named_parameters():
            if tensor.requires_grad:
                yield TrainedParameter(key, name, tensor)
