"""Evaluating a model on batches that it is not trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from nvalchemi.training.arguments import gathered, world_size
from nvalchemi.training.batches import move_to, scalar_loss

__all__ = ["Validation", "ValidationResult", "Weights", "averaged_module", "checked_weights", "evaluate"]

Weights = Literal["auto", "live", "averaged"]


@dataclass(frozen=True, kw_only=True)
class Validation:
    """What a strategy validates on, and how often.

    Parameters
    ----------
    loader : iterable
        The held-out batches; iterated anew each time, so not an iterator.
    every_epochs : int, optional
        Validate when so many epochs have ended; 1 if `every_steps` is not given either.
    every_steps : int, optional
        Validate when so many steps were executed.
    weights : {"auto", "live", "averaged"}
        Which weights are evaluated: ``"auto"`` takes the averaged ones if a hook provides them.

    Examples
    --------
    >>> Validation(loader=[]).every_epochs
    1
    """

    loader: Iterable[Any]
    every_epochs: int | None = None
    every_steps: int | None = None
    weights: Weights = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.loader, Iterator):
            raise ValueError(
                "Validation.loader is an iterator, which is used up after one pass; give a list or a DataLoader."
            )
        checked_weights(self.weights)
        if self.every_epochs is None and self.every_steps is None:
            object.__setattr__(self, "every_epochs", 1)
        for name in ("every_epochs", "every_steps"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"Validation.{name} is {value!r}; it must be an int of 1 or more.")


class ValidationResult(dict[str, float]):
    """Mean losses by name: ``"loss"``, and the named parts if `loss_fn` gives several.

    Attributes
    ----------
    weights : str
        ``"live"`` or ``"averaged"``: which weights were evaluated.
    batches : int
        Over how many batches the means were taken; each batch counts the same.
    """

    def __init__(self, losses: Mapping[str, float], *, weights: str, batches: int) -> None:
        super().__init__(losses)
        self.weights = weights
        self.batches = batches


def checked_weights(weights: Weights) -> Weights:
    """Return which weights to evaluate, or refuse a word that means none."""
    if weights not in ("auto", "live", "averaged"):
        raise ValueError(f'weights is {weights!r}; it must be "auto", "live" or "averaged".')
    return weights


def evaluate(
    predict: Callable[[Any], Any],
    loss_fn: Callable[[Any, Any], Any],
    loader: Iterable[Any],
    device: torch.device,
    *,
    over_ranks: bool = False,
) -> tuple[dict[str, float], int]:
    """Return mean losses over a loader, and the number of batches; of all ranks together if each evaluates a part.

    It runs without gradients; a model that differentiates to predict, forces for example, opens
    ``torch.enable_grad()`` itself. Losses are added up on the device and read once.

    Raises
    ------
    ValueError
        The loader is empty.
    """
    sums: dict[str, torch.Tensor] = {}
    batches = 0
    with torch.no_grad():
        for batch in loader:
            moved = move_to(batch, device)
            loss, parts = scalar_loss(loss_fn(predict(moved), moved), training=False)
            for name, value in {**parts, "loss": loss}.items():
                value = value.detach().to(torch.float64 if value.device.type != "mps" else torch.float32)
                sums[name] = sums[name] + value if name in sums else value
            batches += 1
    totals = {name: float(total) for name, total in sums.items()}
    if over_ranks:
        totals, batches = _added_up(totals, batches)
    if not batches:
        enough = ", at least one batch for each rank" if world_size() > 1 else ""
        raise ValueError(f"The validation loader gave no batches; give one that holds data{enough}.")
    return {name: total / batches for name, total in totals.items()}, batches


def _added_up(totals: dict[str, float], batches: int) -> tuple[dict[str, float], int]:
    """Return the same of all ranks together, the same on each; one may have had no batch."""
    parts = gathered((totals, batches))
    names = dict.fromkeys(name for part, _ in parts for name in part)
    return {name: math.fsum(part.get(name, 0.0) for part, _ in parts) for name in names}, sum(n for _, n in parts)


def averaged_module(provider: Any) -> nn.Module | None:
    """Return the averaged module of a hook, or None before its first update."""
    try:
        averaged = provider.get_averaged_model()
    except RuntimeError:  # the protocol's word for "not built yet"
        return None
    return averaged.module if int(averaged.n_averaged) > 0 else None
