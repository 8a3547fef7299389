"""Whether modules still hold the very tensors they held before, asked every step and answered in microseconds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from operator import getitem, is_
from typing import Any, Self

from torch import Tensor, nn

from nvalchemi.training import is_sharded, local_part

__all__ = ["Fingerprint"]

_address: Callable[[Any], int] = Tensor.data_ptr


def _local_address(tensor: Tensor) -> int:
    return local_part(tensor).data_ptr()


class Fingerprint:
    """Which parameters, buffers and children some modules hold, and where in memory the tensors lie.

    A parameter that was replaced, a child that was exchanged and ``module.to(...)`` all show. No device is waited for.
    Dicts compare their values by identity before anything else, so that one comparison of two lists of dicts sees to
    all objects.

    Parameters
    ----------
    parts : iterable of torch.nn.Module
        The modules to watch; their children only if they are among them.
    located : collection of torch.Tensor, optional
        The tensors whose places in memory are watched; by default all that the parts hold.

    Examples
    --------
    >>> net = nn.Linear(2, 1)
    >>> taken = Fingerprint(net.modules())
    >>> taken.holds(), taken.holds() if net.double() else None
    (True, False)
    """

    def __init__(self, parts: Iterable[nn.Module], located: Collection[Tensor] | None = None) -> None:
        self._slots = [slot for part in parts for slot in (part._parameters, part._buffers, part._modules)]
        # What is freed may be followed by something else at its place, so everything is kept alive.
        self._held = [dict(slot) for slot in self._slots]
        odd = [(slot, name) for slot in self._slots for name, value in slot.items() if _may_equal_another(value)]
        self._odd_places = [slot for slot, _ in odd], [name for _, name in odd]
        self._odd = [slot[name] for slot, name in odd]
        held = [value for slot in self._held for value in slot.values() if isinstance(value, Tensor)]
        self._tensors = held if located is None else located
        self._locate = _local_address if any(map(is_sharded, self._tensors)) else _address
        self._addresses = list(map(self._locate, self._tensors))

    @classmethod
    def of_first_parameter(cls, module: nn.Module) -> Self:
        """Watch what leads to a module's first parameter, for modules that change as a whole or not at all."""
        name, first = next(module.named_parameters())
        path = name.split(".")[:-1]
        return cls([module.get_submodule(".".join(path[:depth])) for depth in range(len(path) + 1)], [first])

    def holds(self) -> bool:
        """Return whether everything is as it was."""
        try:
            same = self._slots == self._held
        except (RuntimeError, TypeError, ValueError):  # another tensor: whether all its elements are equal is no bool
            return False
        return (
            same
            and all(map(is_, map(getitem, *self._odd_places), self._odd))
            and list(map(self._locate, self._tensors)) == self._addresses
        )


def _may_equal_another(value: object) -> bool:
    """Whether something else than this very object could be equal to it: it is to be looked at by itself."""
    if isinstance(value, Tensor):
        return type(value) not in (Tensor, nn.Parameter, nn.Buffer) or value.numel() < 2
    return value is not None and type(value).__eq__ is not object.__eq__
