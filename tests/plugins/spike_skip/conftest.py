"""Parameters, and optimizers that show what gradient they were given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn


@pytest.fixture
def zeros() -> Callable[..., nn.Parameter]:
    """Makes parameters, all elements 0: after a step of SGD with learning rate 1 they are the negative gradient."""

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
        return nn.Parameter(torch.zeros(shape, dtype=dtype))

    return make


@pytest.fixture
def sgd() -> Callable[..., torch.optim.Optimizer]:
    """Makes optimizers that subtract the gradient."""

    def make(*parameters: nn.Parameter) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)

    return make
