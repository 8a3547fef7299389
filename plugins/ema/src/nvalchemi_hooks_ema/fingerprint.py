"""Whether a model still holds the very tensors it held before, asked every step and answered in microseconds."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

from torch import Tensor, nn

__all__ = ["Fingerprint"]

_address: Callable[[Any], int] = Tensor.data_ptr


class Fingerprint:
    """Where in memory a module's parameters and buffers lie, and which children it has.

    A parameter that was replaced, a child that was exchanged and ``module.to(...)`` all show. No device is waited for.

    Parameters
    ----------
    module : torch.nn.Module
        The module to watch.

    Examples
    --------
    >>> net = nn.Linear(2, 1)
    >>> taken = Fingerprint(net)
    >>> taken.holds(), taken.holds() if net.double() else None
    (True, False)
    """

    def __init__(self, module: nn.Module) -> None:
        parts = list(module.modules())
        held = [(slot, name) for part in parts for slot in (part._parameters, part._buffers) for name in slot]
        tensors = [(slot, name) for slot, name in held if slot[name] is not None]
        faceless = [(slot, name) for slot, name in tensors if _address(slot[name]) == 0]  # empty or sharded
        objects = [*((part._modules, name) for part in parts for name in part._modules), *faceless]
        self._slots = [slot for part in parts for slot in (part._parameters, part._buffers, part._modules)]
        self._tensors = [slot for slot, _ in tensors], [name for _, name in tensors]
        self._objects = [slot for slot, _ in objects], [name for _, name in objects]
        # What is freed may be followed by something else at its place, so everything is kept alive.
        self._alive = [slot[name] for slot, name in [*tensors, *objects]]
        self._taken = self._take()

    def holds(self) -> bool:
        """Return whether everything is as it was."""
        try:
            return self._take() == self._taken
        except (KeyError, TypeError):  # a name is gone, or None stands there now
            return False

    def _take(self) -> tuple[int, list[int], list[int]]:
        return (
            sum(map(len, self._slots)),
            list(map(id, map(getitem, *self._objects))),
            list(map(_address, map(getitem, *self._tensors))),
        )
