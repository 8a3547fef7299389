"""Errors on held-out configurations: of the live weights, the averaged ones, and a prediction that costs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from data import Split, composition_means
from graphs import Frame, batches, collate
from model import Prediction
from torch import nn

from nvalchemi.hooks import ProvidesAveragedModel, ProvidesInferenceContext
from nvalchemi.training import TrainingStrategy


class Errors(NamedTuple):
    """Mean absolute errors: over configurations, and over components of forces."""

    energy_mae: float
    """meV/atom."""
    force_mae: float
    """meV/Å."""


def averaged_model(strategy: TrainingStrategy) -> nn.Module | None:
    """Return the model with averaged weights, of whichever hook keeps one."""
    hooks = [hook for hook in strategy.orchestrator.iter_hooks() if isinstance(hook, ProvidesAveragedModel)]
    return hooks[0].get_averaged_model() if hooks else None


def predict(strategy: TrainingStrategy, model: nn.Module, frames: Sequence[Frame]) -> Prediction:
    """Predict frames in the precision of the training; the result is on the CPU."""
    with ExitStack() as stack:
        for hook in strategy.orchestrator.iter_hooks():
            if isinstance(hook, ProvidesInferenceContext):
                stack.enter_context(hook.inference_context(strategy.device))
        model.eval()
        parts = [model(batch.to(strategy.device)) for batch in batches(frames)]
    energies, forces = (torch.cat(part).detach().cpu() for part in zip(*parts, strict=True))
    return Prediction(energies, forces)


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
