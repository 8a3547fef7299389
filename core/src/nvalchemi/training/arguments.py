"""What a strategy is given: checked when it is given, with the remedy in the message."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import distributed, nn

__all__ = [
    "checked_callable",
    "checked_length",
    "checked_models",
    "chosen_device",
    "gathered",
    "global_rank",
    "length_of",
    "why_no_batches",
    "world_size",
]

_AVAILABLE = distributed.is_available()


def checked_models(models: object) -> dict[str, nn.Module]:
    """Return models by name, a module alone as ``"main"``, or say what is wrong with them."""
    named = {"main": models} if isinstance(models, nn.Module) else models
    if not isinstance(named, Mapping) or not named:
        raise TypeError(
            f"models is {models!r}; give an nn.Module, or a mapping from names to modules that is not empty."
        )
    for key, model in named.items():
        if not isinstance(key, str) or not isinstance(model, nn.Module):
            raise TypeError(f"models[{key!r}] is a {type(model).__name__}; give names (str) and nn.Modules.")
    return dict(named)


def checked_callable(name: str, value: Any) -> Any:
    """Return a function that was given under a name, or say that it cannot be called."""
    if not callable(value):
        raise TypeError(
            f"{name} is {value!r}; give a callable: {name}({'predictions' if name == 'loss_fn' else 'model'}, batch)."
        )
    return value


def checked_length(num_epochs: int | None, num_steps: int | None) -> tuple[int | None, int | None]:
    """Return how long a run is, of which exactly one is given."""
    if (num_epochs is None) == (num_steps is None):
        both = "neither is given" if num_epochs is None else f"both are given ({num_epochs!r} and {num_steps!r})"
        raise ValueError(f"A run is as long as num_epochs or num_steps says, but {both}; give exactly one of the two.")
    for name, value in (("num_epochs", num_epochs), ("num_steps", num_steps)):
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name} is {value!r}; it must be an int of 1 or more.")
    return num_epochs, num_steps


def chosen_device(devices: Any, models: Mapping[str, nn.Module]) -> torch.device:
    """Return where this process trains; where the models are, unless devices were given."""
    if devices is None:
        parameters = (p for model in models.values() for p in model.parameters())
        return next((parameter.device for parameter in parameters), torch.device("cpu"))
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        if not devices:
            raise ValueError("devices is empty; give a device, or leave it out so that models stay where they are.")
        devices = devices[local_rank() % len(devices)]
    try:
        device = torch.device(devices)
        if device.type == "cuda" and device.index is None and "LOCAL_RANK" in os.environ:
            device = torch.device("cuda", local_rank())
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # how torch says that it does not know or does not have it
        raise ValueError(
            f"devices is {devices!r}, which cannot be used here ({error}); give 'cpu', for example."
        ) from error
    return device


def global_rank() -> int:
    """Return the number of this process among all; 0 when there is one.

    Before there is a process group it is the one that ``torchrun`` tells, so that nothing is printed or written twice.
    """
    if _AVAILABLE and distributed.is_initialized():
        return distributed.get_rank()
    return _told("RANK")


def local_rank() -> int:
    """Return the number of this process on its machine, as ``torchrun`` tells it; else `global_rank`."""
    return _told("LOCAL_RANK") if "LOCAL_RANK" in os.environ else global_rank()


def _told(name: str) -> int:
    told = os.environ.get(name, "") if "WORLD_SIZE" in os.environ else ""  # alone, RANK may be anybody's word
    return int(told) if told.isdecimal() else 0


def world_size() -> int:
    """Return how many processes train together."""
    return distributed.get_world_size() if _AVAILABLE and distributed.is_initialized() else 1


def gathered(value: Any) -> list[Any]:
    """Return what each rank gives, in order; every rank has to ask. What is given is pickled."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    distributed.all_gather_object(values, value)
    return values


def length_of(loader: Iterable[Any]) -> int | None:
    """Return how many batches a loader has, None where nobody knows."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:  # a stream: nobody knows how long it is
        return None


def why_no_batches(loader: Iterable[Any], epoch: int) -> str:
    """Say why a pass over a loader gave nothing."""
    used_up = isinstance(loader, Iterator)
    why = "it is an iterator, which is used up after one pass" if used_up else "it is empty"
    return (
        f"The loader ({type(loader).__name__}) gave no batches in epoch {epoch}: {why}; "
        "give a list or a DataLoader that holds data."
    )
