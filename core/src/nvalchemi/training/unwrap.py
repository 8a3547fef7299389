"""The model inside its wrappers."""

from __future__ import annotations

from torch import nn

__all__ = ["bare_module"]


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
        elif (
            "_orig_mod" in module._modules
        ):  # what torch.compile returns; asking for its type would import torch._dynamo
            module = module.get_submodule("_orig_mod")
        else:
            return module
