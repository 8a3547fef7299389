"""The model inside its wrappers."""

from __future__ import annotations

import sys
from functools import lru_cache

from torch import nn

__all__ = ["bare_module", "unreplicated"]


def bare_module(module: nn.Module) -> nn.Module:
    """Return the user's own module, without the wrappers that torch puts around it.

    ``DistributedDataParallel``, ``DataParallel`` and ``torch.compile`` are taken off, however they are nested. They are
    known by what they are, never by an attribute's name: a model with a child called ``module`` is left alone.

    Parameters
    ----------
    module : torch.nn.Module
        A module, wrapped or not.

    Returns
    -------
    torch.nn.Module
        The innermost module.

    Examples
    --------
    >>> net = nn.Linear(2, 1)
    >>> bare_module(nn.DataParallel(net)) is net
    True
    """
    while attribute := _inner(type(module)):  # type: ignore[arg-type]  # a class has a hash
        module = module.get_submodule(attribute)
    return module


def unreplicated(module: nn.Module) -> nn.Module:
    """Return a module without ``DistributedDataParallel`` around it, whose forward would wait for other ranks."""
    while isinstance(module, nn.parallel.DistributedDataParallel):
        module = module.module
    return module


@lru_cache  # asked at every step, and slow to answer: these classes are abstract ones
def _inner(kind: type[nn.Module]) -> str:
    """Return under which name a wrapper of this class holds the module; empty if it is none."""
    if issubclass(kind, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return "module"
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # where it was never imported nothing can be compiled
    return "_orig_mod" if dynamo is not None and issubclass(kind, dynamo.OptimizedModule) else ""
