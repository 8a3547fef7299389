"""The process group: joined from what torchrun tells, unless there is one already."""

from __future__ import annotations

import atexit
import os
import sys
from datetime import timedelta

import torch
from torch import distributed

from nvalchemi.errors import HookConflictError

__all__ = ["join", "ranks"]

_TOLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def ranks() -> int:
    """Return how many processes train together: 1 where there is no process group."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def join(device: torch.device, backend: str | None, timeout: float) -> None:
    """Join the process group that torchrun describes; one process needs none, and an existing one is kept.

    A group that was made here is left when the process ends, and no other.

    Parameters
    ----------
    device : torch.device
        Where this process trains.
    backend : str, optional
        By default ``nccl`` on CUDA and ``gloo`` elsewhere.
    timeout : float
        Seconds that one rank waits for another.

    Raises
    ------
    HookConflictError
        A ``ValueError``: the environment says that there are others but not how to find them, or an existing group
        cannot reach the device.
    """
    if distributed.is_available() and distributed.is_initialized():
        if ranks() > 1 and device.type == "cpu" and distributed.get_backend() == "nccl":
            raise HookConflictError(
                "The process group that exists has the backend nccl, but the models are on the CPU, which nccl cannot "
                "reach; put them on a GPU (devices=...), or initialise the group with gloo."
            )
        return
    if _world() == 1:
        return
    if missing := [name for name in _TOLD if name not in os.environ]:
        raise HookConflictError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(missing)} is not set, so the other processes "
            "cannot be found; start the program with torchrun, which sets all of them."
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    chosen = backend or ("nccl" if device.type == "cuda" else "gloo")
    distributed.init_process_group(chosen, timeout=timedelta(seconds=timeout))
    atexit.register(_leave)  # not when a run is over: models that are spread over it can go on in the next


def _leave() -> None:
    failed = getattr(sys, "last_value", None) is not None  # the others do not wait for each other any more
    if distributed.is_initialized() and not failed:
        distributed.destroy_process_group()


def _world() -> int:
    told = os.environ.get("WORLD_SIZE", "1")
    if not told.isdecimal() or int(told) < 1:
        raise HookConflictError(f"WORLD_SIZE is {told!r} in the environment; it is a number of 1 or more.")
    if int(told) > 1 and not distributed.is_available():
        raise HookConflictError(f"WORLD_SIZE is {told}, but this build of torch has no torch.distributed.")
    return int(told)
