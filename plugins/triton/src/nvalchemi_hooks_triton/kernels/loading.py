"""When triton is imported, and whether its programs can run on a device."""

from __future__ import annotations

import os
from functools import cache
from types import ModuleType

import torch

__all__ = ["obstacle", "programs"]
_OLDEST = (8, 0)  # compute capability: bfloat16, which triton cannot do without
_REMEDY = (
    "torch's CUDA builds for Linux bring the triton that fits them; elsewhere, "
    "pip install 'nvalchemi-hooks[triton]', or leave the triton hook out."
)


def programs() -> ModuleType:
    """Import triton and return the module of its programs.

    Raises
    ------
    ImportError
        Triton is not there, or cannot be imported; the cause is kept, the message says what to do.
    """
    try:
        from nvalchemi_hooks_triton.kernels import device
    except Exception as error:  # a triton that does not fit this system may raise anything; it stays the cause
        raise ImportError(
            f"TritonHook needs triton, which cannot be imported ({type(error).__name__}: {error}): {_REMEDY}"
        ) from error
    return device


def obstacle(device: torch.device) -> str:
    """Return why the programs cannot run on tensors of a device; empty if they can.

    Parameters
    ----------
    device : torch.device
        Where the tensors are. On a CPU the programs run in Triton's interpreter, for tests: ``TRITON_INTERPRET=1`` has
        to be set before triton is imported.

    Raises
    ------
    ImportError
        See `programs`; only where the device would do.

    Examples
    --------
    >>> obstacle(torch.device("meta"))
    'there are no programs for tensors on meta'
    """
    if device.type not in ("cuda", "cpu"):
        return f"there are no programs for tensors on {device.type}"
    if device.type == "cpu":
        wanted = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes")
        return "" if wanted and programs().INTERPRETED else "tensors are on a CPU, where only Triton's interpreter runs"
    if programs().INTERPRETED:
        return "Triton's interpreter is on, which is for tensors on a CPU"
    return _too_old(device)


@cache
def _too_old(device: torch.device) -> str:
    capability = torch.cuda.get_device_capability(device)
    return "" if capability >= _OLDEST else f"compute capability {capability} of {device} is below {_OLDEST}"
