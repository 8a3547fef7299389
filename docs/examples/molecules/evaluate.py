"""Errors on held-out configurations: of the live weights, the averaged ones, and a prediction that costs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from data import Frame, Split, batches, collate, composition_means
from model import Prediction

from nvalchemi.hooks import ProvidesAveragedModel, ProvidesInferenceContext
from nvalchemi.training import TrainingStrategy


class Errors(NamedTuple):
    """Mean absolute errors: over configurations, and over components of forces."""

    energy_mae: float
    """meV/atom."""
    force_mae: float
    """meV/Å."""


def predict(strategy: TrainingStrategy, frames: Sequence[Frame], weights: str) -> Prediction | None:
    """Predict frames with the live or the averaged weights, in the precision of the training.

    Returns
    -------
    Prediction or None
        On the CPU; None where no hook keeps averaged weights.
    """
    hooks = list(strategy.orchestrator.iter_hooks())
    module: Any = strategy.models["main"]
    if weights == "averaged":
        averaging = [hook for hook in hooks if isinstance(hook, ProvidesAveragedModel)]
        if not averaging:
            return None
        module = averaging[0].get_averaged_model()
    with ExitStack() as stack:
        for hook in hooks:
            if isinstance(hook, ProvidesInferenceContext):
                stack.enter_context(hook.inference_context(strategy.device))
        module.eval()
        parts = [module(batch.to(strategy.device)) for batch in batches(frames)]
    return Prediction(*(torch.cat(part).detach().cpu() for part in zip(*parts, strict=True)))


def trivial(parts: Split) -> Prediction:
    """Predict the mean training energy of the composition, and no forces."""
    means = composition_means(parts.training)
    energy = torch.tensor([means[frame.composition] for frame in parts.held_out], dtype=torch.float64)
    return Prediction(energy, torch.zeros_like(collate(parts.held_out).forces))


def errors_of(prediction: Prediction, frames: Sequence[Frame]) -> Errors:
    """Compare a prediction with the labels of its frames."""
    true = collate(frames)
    energy = ((prediction.energy - true.energy) / true.sizes).abs().mean().item()
    forces = (prediction.forces - true.forces).abs().mean().item()
    return Errors(1e3 * energy, 1e3 * forces)
