"""What a captured update finds in the same place each time: the batch, learning rates, weights, and state."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LearningRates", "StaticBatch", "addresses", "settings", "trained"]


class StaticBatch:
    """A batch that is filled with one batch after the other.

    Parameters
    ----------
    batch : Any
        A tensor, or mappings, lists and tuples of tensors. Anything else in it is kept as it is.
    device : torch.device
        Where it is to lie.

    Examples
    --------
    >>> static = StaticBatch({"x": torch.zeros(2)}, torch.device("cpu"))
    >>> place = static.batch["x"]
    >>> static.fill({"x": torch.ones(2)})
    >>> place
    tensor([1., 1.])
    """

    def __init__(self, batch: Any, device: torch.device) -> None:
        self.batch = _mapped(batch, lambda tensor: tensor.detach().to(device, copy=True))
        self._tensors = list(_tensors(self.batch))

    def fill(self, batch: Any) -> None:
        """Take over the numbers of a batch of the same `shape`."""
        torch._foreach_copy_(self._tensors, list(_tensors(batch)), non_blocking=True)

    @staticmethod
    def shape(batch: Any) -> Hashable:
        """Return what two batches have in common that fit one place: everything but the numbers in their tensors.

        Raises
        ------
        TypeError
            The batch holds something that is neither a tensor nor a constant.
        """
        if isinstance(batch, Tensor):
            return tuple(batch.shape), batch.dtype
        if isinstance(batch, Mapping):
            return tuple((key, StaticBatch.shape(value)) for key, value in batch.items())
        if isinstance(batch, list | tuple):
            return type(batch), tuple(map(StaticBatch.shape, batch))
        if batch is None or isinstance(batch, bool | int | float | str | bytes):
            return batch
        raise TypeError(
            f"A captured update was given a {type(batch).__name__} in a batch, and cannot tell what of it has to "
            "be copied; give tensors, mappings, lists and tuples of them, and plain constants."
        )


class LearningRates:
    """The learning rates of optimizers, in tensors while an update runs: schedulers move them between two replays."""

    def __init__(self) -> None:
        self._kept: list[tuple[dict[str, Any], Tensor]] = []
        self._values: list[float] = []

    def fill(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Bring the tensors up to date; rates that are tensors already stay what they are."""
        groups = [group for optimizer in optimizers for group in optimizer.param_groups if _has_rate(group)]
        if len(groups) != len(self._kept) or any(
            g is not kept for g, (kept, _) in zip(groups, self._kept, strict=True)
        ):
            self._kept = [(group, torch.zeros((), device=group["params"][0].device)) for group in groups]
            self._values = [0.0] * len(groups)
        for place, (group, tensor) in enumerate(self._kept):
            if group["lr"] != self._values[place]:
                tensor.fill_(group["lr"])
                self._values[place] = group["lr"]

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have optimizers find the tensors, and numbers again afterwards."""
        numbers = [group["lr"] for group, _ in self._kept]
        for group, tensor in self._kept:
            group["lr"] = tensor
        try:
            yield
        finally:
            for (group, _), number in zip(self._kept, numbers, strict=True):
                group["lr"] = number


def addresses(models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> Hashable:
    """Return where weights, buffers and the state of optimizers lie in memory."""
    held = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    for optimizer in optimizers:
        held += [parameter for group in optimizer.param_groups for parameter in group["params"]]
        held += [one for state in optimizer.state.values() for one in state.values() if isinstance(one, Tensor)]
    return tuple(map(Tensor.data_ptr, held))


def settings(optimizers: Iterable[torch.optim.Optimizer]) -> Hashable:
    """Return the settings of optimizers that are Python numbers in a captured step: all but learning rates."""
    return tuple(
        (name, value.data_ptr() if isinstance(value, Tensor) else tuple(value) if isinstance(value, list) else value)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for name, value in group.items()
        if name not in ("params", "initial_lr") and not (name == "lr" and _has_rate(group))
    )


def trained(optimizers: Iterable[torch.optim.Optimizer]) -> Hashable:
    """Return which parameters need gradients: a captured backward pass goes on computing those that it did."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return tuple(parameter.requires_grad for group in groups for parameter in group["params"])


def _has_rate(group: Mapping[str, Any]) -> bool:
    return bool(group["params"]) and isinstance(group.get("lr"), int | float)


def _mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: _mapped(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(value, change) for value in batch))
    return type(batch)(_mapped(value, change) for value in batch) if isinstance(batch, list | tuple) else batch


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | list | tuple):
        parts: Sequence[Any] = list(batch.values()) if isinstance(batch, Mapping) else batch
        for part in parts:
            yield from _tensors(part)
