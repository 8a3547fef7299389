"""A run as small as it can be: a seeded model, seeded batches, and a strategy that trains in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi.training import OptimizerConfig, TrainingStrategy

__all__ = ["TinyModel", "poison", "tiny_batches", "tiny_strategy"]

Batch = tuple[Tensor, Tensor]
_FEATURES = 4


class TinyModel(nn.Module):
    """Two linear layers with a tanh between them: (n, 4) to (n, 1).

    Examples
    --------
    >>> TinyModel()(torch.zeros(3, 4)).shape
    torch.Size([3, 1])
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(_FEATURES, 6)
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return predictions of shape (n, 1)."""
        hidden: Tensor = self.last(self.first(x).tanh())
        return hidden


def poison(tensor: Tensor, value: float = torch.inf) -> Tensor:
    """Return a copy whose first element is `value`; an inf or a nan in a target makes gradients that are not finite.

    Examples
    --------
    >>> poison(torch.zeros(3))
    tensor([inf, 0., 0.])
    """
    copied = tensor.clone()
    copied.view(-1)[0] = value
    return copied


def tiny_batches(
    count: int = 4, *, seed: int = 0, poisoned: Mapping[int, float] | None = None, dtype: torch.dtype = torch.float32
) -> list[Batch]:
    """Make pairs (x, y) for `tiny_strategy`, the same at each call; global random numbers are left alone.

    Parameters
    ----------
    count : int
        How many.
    seed : int
        Other data for another seed.
    poisoned : mapping of int to float, optional
        The number of a batch, from 0, to what its first target becomes: inf or nan, for gradients that are not finite.
    dtype : torch.dtype
        Of x and y.

    Returns
    -------
    list of (Tensor, Tensor)
        Of shapes (8, 4) and (8, 1).

    Examples
    --------
    >>> batches = tiny_batches(2, poisoned={1: torch.nan})
    >>> [bool(y.isfinite().all()) for _, y in batches]
    [True, False]
    """
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for number in range(count):
        x = torch.randn(8, _FEATURES, generator=generator, dtype=torch.float64)
        y = 3 * x.sum(1, keepdim=True).sin()
        if poisoned and number in poisoned:
            y = poison(y, poisoned[number])
        batches.append((x.to(dtype), y.to(dtype)))
    return batches


def tiny_strategy(*hooks: object, seed: int = 0, **options: Any) -> TrainingStrategy:
    """Make a strategy that trains a seeded `TinyModel`: SGD with momentum, a scheduler, one epoch.

    Parameters
    ----------
    *hooks : object
        Anything that `TrainingStrategy` takes for a hook: names, ``{name: arguments}``, hooks.
    seed : int
        The global random numbers of torch start from it: those of the model, and again those of the run.
    **options
        Arguments of `TrainingStrategy`, instead of those above.

    Examples
    --------
    >>> strategy = tiny_strategy(num_epochs=2)
    >>> strategy.run(tiny_batches())
    >>> strategy.step_count
    8
    """
    if "num_steps" not in options:
        options.setdefault("num_epochs", 1)
    defaults: dict[str, Any] = {"loss_fn": _square_error, "training_fn": _first_of_batch, "progress": False}
    if "models" not in options:
        torch.manual_seed(seed)
        defaults["models"] = TinyModel()
    if "optimizer_configs" not in options:
        defaults["optimizer_configs"] = OptimizerConfig(
            optimizer_cls="SGD",
            optimizer_kwargs={"lr": 0.05, "momentum": 0.9},
            scheduler_cls="StepLR",
            scheduler_kwargs={"step_size": 2, "gamma": 0.5},
        )
    torch.manual_seed(seed)
    return TrainingStrategy(hooks=list(hooks), **{**defaults, **options})


def _first_of_batch(model: nn.Module, batch: Batch) -> Any:
    return model(batch[0])


def _square_error(predictions: Tensor, batch: Batch) -> Tensor:
    return (predictions - batch[1]).square().mean()
