"""Batches of any make, and the loss they give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["move_to", "scalar_loss"]


def move_to(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on `device`.

    Parameters
    ----------
    batch : Any
        A tensor, an object with ``.to(device)``, or a mapping or sequence of batches (tuples stay tuples, other
        sequences become lists). Anything else, numbers and strings for instance, stays as it is.
    device : torch.device
        Where to.

    Examples
    --------
    >>> move_to({"x": torch.zeros(1), "names": ["H"]}, torch.device("meta"))["x"].device
    device(type='meta')
    """
    if isinstance(batch, Tensor):
        return batch.to(device)
    if type(batch) is tuple:
        return tuple([move_to(value, device) for value in batch])
    if callable(getattr(batch, "to", None)):
        moved = batch.to(device)
        return batch if moved is None else moved  # it has moved in place
    if isinstance(batch, Mapping):
        return {key: move_to(value, device) for key, value in batch.items()}
    if not isinstance(batch, Sequence) or isinstance(batch, str | bytes | bytearray | memoryview | range):
        return batch
    values = [move_to(value, device) for value in batch]
    if isinstance(batch, tuple):
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    return values


def scalar_loss(result: Any, *, training: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Check what a loss function returned.

    Parameters
    ----------
    result : torch.Tensor or mapping of str to torch.Tensor
        A scalar, or named scalars: ``"loss"`` is what is trained on, or the sum of all if there is none of that name.
    training : bool
        Whether it has to carry a graph.

    Returns
    -------
    (loss, parts)
        The scalar to train on, 0-dim, and the named scalars (empty if there was one).

    Raises
    ------
    TypeError
        Something is no tensor.
    ValueError
        Something is not a scalar, or has no graph although `training`.
    """
    if isinstance(result, Tensor):  # asked first, for whether it is a mapping is slow to answer
        parts, loss = {}, _scalar(result, "loss_fn(...)")
    elif isinstance(result, Mapping):
        parts = {str(name): _scalar(value, f"loss_fn(...)[{name!r}]") for name, value in result.items()}
        if not parts:
            raise ValueError("loss_fn returned an empty mapping; give named scalar tensors.")
        loss = parts["loss"] if "loss" in parts else torch.stack(list(parts.values())).sum()
    else:
        parts, loss = {}, _scalar(result, "loss_fn(...)")
    if training and not loss.requires_grad:
        raise ValueError(
            "The loss has no graph (requires_grad is False), so nothing could be trained; do not detach it, and "
            "compute it from the predictions of a model that is trained."
        )
    return loss, parts


def _scalar(value: Any, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{what} is a {type(value).__name__} ({value!r}); it must be a scalar tensor.")
    if value.numel() != 1:
        raise ValueError(f"{what} has shape {tuple(value.shape)}; it must be a scalar: take its mean or sum.")
    return value.reshape(())
