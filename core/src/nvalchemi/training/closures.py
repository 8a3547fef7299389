"""Optimizers that need a closure, and why they are refused."""

from __future__ import annotations

import inspect
from functools import cache

import torch

from nvalchemi.errors import UnsupportedOptimizerError

__all__ = ["refuse_closure"]


def refuse_closure(optimizer: type[torch.optim.Optimizer]) -> None:
    """Refuse an optimizer class whose ``step`` cannot do without a closure.

    Parameters
    ----------
    optimizer : type of torch.optim.Optimizer
        For instance ``torch.optim.LBFGS``.

    Raises
    ------
    UnsupportedOptimizerError
        It evaluates the loss several times a step, while hooks run once.

    Examples
    --------
    >>> refuse_closure(torch.optim.AdamW)
    """
    if _needs_closure(optimizer):  # type: ignore[arg-type]  # a class has a hash
        raise UnsupportedOptimizerError(
            f"{optimizer.__name__} needs a closure: it evaluates the loss several times in a step, but hooks run "
            "once a step; use an optimizer whose step() takes no closure (Adam, AdamW, SGD, ...), or step it in a loop "
            "of your own."
        )


@cache
def _needs_closure(optimizer: type) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")  # type: ignore[attr-defined]
    return closure is not None and closure.default is inspect.Parameter.empty
