"""The model inside its wrappers."""

from __future__ import annotations

import sys

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
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            module = module.module
        elif _is_compiled(module):
            module = module.get_submodule("_orig_mod")
        else:
            return module


def unreplicated(module: nn.Module) -> nn.Module:
    """Return a module without ``DistributedDataParallel`` around it, whose forward would wait for other ranks."""
    while isinstance(module, nn.parallel.DistributedDataParallel):
        module = module.module
    return module


def _is_compiled(module: nn.Module) -> bool:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # where it was never imported nothing can be compiled
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)
