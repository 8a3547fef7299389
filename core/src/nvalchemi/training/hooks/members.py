"""An optimizer's parameters, with everything about them that is the same from window to window."""

from __future__ import annotations

from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nvalchemi.training.sharding import any_sharded

__all__ = ["Members", "Roster"]


class Members:
    """The parameters of one optimizer, group by group.

    Attributes
    ----------
    parameters : list of torch.Tensor
        All of them.
    device : torch.device or None
        The one on which all lie; None if they lie on several.
    double : bool
        Any of them is float64.
    single : bool
        All of them are float32.
    plain : bool
        All of them are real and hold something.
    spread : bool
        Of any of them each rank holds a part.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = [(group, list(group["params"])) for group in optimizer.param_groups]
        self.parameters: list[Tensor] = [parameter for _, members in self._groups for parameter in members]
        devices = {parameter.device for parameter in self.parameters}
        dtypes = {parameter.dtype for parameter in self.parameters}
        self.device = devices.pop() if len(devices) == 1 else None
        self.double = torch.float64 in dtypes
        self.single = dtypes == {torch.float32}
        self.plain = not any(p.is_complex() or p.numel() == 0 for p in self.parameters)
        self.spread = any_sharded(self.parameters)
        self._with_grad = self.parameters

    def hold(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether groups and parameters are still these."""
        groups: list[dict[str, Any]] = optimizer.param_groups
        return len(groups) == len(self._groups) and all(
            group is before and len(group["params"]) == len(members) and all(map(is_, group["params"], members))
            for group, (before, members) in zip(groups, self._groups, strict=True)
        )

    def with_grad(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters that have a gradient, the same list as before if they are the same; and gradients."""
        grads = [grad for parameter in self.parameters if (grad := parameter.grad) is not None]
        if len(grads) == len(self.parameters):
            return self.parameters, grads
        found = [parameter for parameter in self.parameters if parameter.grad is not None]
        if len(found) != len(self._with_grad) or not all(map(is_, found, self._with_grad)):
            self._with_grad = found
        return self._with_grad, grads


class Roster:
    """The members of every optimizer that was asked about."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[torch.optim.Optimizer, Members] = WeakKeyDictionary()

    def members(self, optimizer: torch.optim.Optimizer) -> Members:
        """Return what is known of an optimizer, looked at anew if it has changed."""
        members = self._known.get(optimizer)
        if members is None or not members.hold(optimizer):
            self._known[optimizer] = members = Members(optimizer)
        return members

    def __reduce__(self) -> tuple[type[Roster], tuple[()]]:
        return Roster, ()  # it is filled anew where the optimizers are
