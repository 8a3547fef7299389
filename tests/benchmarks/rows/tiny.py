"""The tiny network of the loops: so small that only overhead is left."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["BATCH", "adamw", "loss_of", "mlp"]

_GENERATOR = torch.Generator().manual_seed(0)
BATCH = (torch.randn(8, 16, generator=_GENERATOR), torch.randn(8, 16, generator=_GENERATOR))


def mlp() -> nn.Sequential:
    """Return four layers of 16 x 16, the same at each call."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return the optimizer of every loop."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def loss_of(predictions: Tensor, y: Tensor) -> Tensor:
    """Return the mean square error."""
    return nn.functional.mse_loss(predictions, y)
