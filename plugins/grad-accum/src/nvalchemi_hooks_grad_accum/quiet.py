"""Backward passes that add nothing, or that other ranks do not hear of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["adding_nothing", "unheard"]


def unheard(models: Mapping[str, Any]) -> Iterator[AbstractContextManager[Any]]:
    """Yield, for every model that reduces its gradients over ranks, a context of forward and backward without that.

    ``DistributedDataParallel`` decides in its forward pass whether it reduces, so the context has to span it. One with
    a static graph takes no such context: it reduces every time, and the gradients are the same.
    """
    for model in models.values():
        if callable(set_sync := getattr(model, "set_requires_gradient_sync", None)):  # FSDP2
            yield _without(set_sync)
        elif callable(no_sync := getattr(model, "no_sync", None)) and not getattr(model, "static_graph", False):  # DDP
            yield no_sync()


@contextmanager
def _without(set_sync: Any) -> Iterator[None]:
    set_sync(False)
    try:
        yield
    finally:
        set_sync(True)


@contextmanager
def adding_nothing(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Let backward passes add zeros to the gradients, whatever they compute.

    The graph is walked all the same: every parameter of it gets its turn, so that ranks that reduce gradients wait for
    nobody, and parameters outside it stay without a gradient. A loss times zero would not do: zero times nan is nan.
    """
    parameters = {id(p): p for one in optimizers for group in one.param_groups for p in group["params"]}
    handles = [p.register_hook(_zeros) for p in parameters.values() if p.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _zeros(gradient: Tensor) -> Tensor:
    return torch.zeros_like(gradient)
