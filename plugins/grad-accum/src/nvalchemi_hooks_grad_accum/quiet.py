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
def adding_nothing(loss: Tensor, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Let the backward pass of a loss add zeros to the gradients, whatever it computes.

    The graph is walked all the same: every parameter of it gets its turn, so that ranks that reduce gradients wait for
    nobody, and parameters outside it stay without a gradient. A loss times zero would not do: zero times nan is nan.
    A sharded model computes with gathered weights, which are no parameters of an optimizer, but leaves of the graph.
    """
    parameters = [p for one in optimizers for group in one.param_groups for p in group["params"]]
    leaves = {id(leaf): leaf for leaf in (*parameters, *_leaves(loss)) if leaf.requires_grad}
    handles = [leaf.register_hook(_zeros) for leaf in leaves.values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors to which the backward pass of a loss adds gradients."""
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf


def _zeros(gradient: Tensor) -> Tensor:
    return torch.zeros_like(gradient)
