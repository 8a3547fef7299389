"""A stand-in for a CUDA graph: what torch dispatches is remembered, undone, and done again at a replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["RecordedGraph"]

_HOST_READS = {"_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero"}


class RecordedGraph:
    """An `nvalchemi.training.hooks.UpdateGraph` that needs no GPU.

    As in a CUDA graph, Python runs once: a replay does the same operations on the same memory, with the numbers that
    Python held then. Nothing is done while it is captured: memory that was there before has its old content afterwards,
    and what was made in between holds nan until the first replay. An operation that would have the host read from the
    device is an error, and no random number is drawn. So an update that comes to the same with it as without holds no state in the wrong place.

    Notes
    -----
    What ``Tensor.tolist()`` reads of a 0-dim tensor on a CPU it does not see, nor what a compiled kernel does.

    Examples
    --------
    >>> graph, total, factor = RecordedGraph(), torch.zeros(1), 2.0
    >>> with graph.capture():
    ...     _ = total.add_(factor)
    >>> total
    tensor([0.])
    >>> factor = 5.0  # a Python number, which a graph does not look at again
    >>> graph.replay()
    >>> graph.replay()
    >>> total
    tensor([4.])
    """

    def __init__(self) -> None:
        self._tape = _Tape()

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Remember what is dispatched inside the context, and undo it at its end."""
        drawn = torch.get_rng_state()
        try:
            with self._tape:
                yield
        finally:
            self._tape.undo()
            torch.set_rng_state(drawn)

    def replay(self) -> None:
        """Do it again."""
        with torch.no_grad():
            for func, args, kwargs, made in self._tape.operations:
                out = tree_leaves(func(*args, **kwargs))
                for place, value in zip(made, out, strict=True):
                    if place is not None:
                        place.copy_(value)


class _Tape(TorchDispatchMode):
    """Operations, the memory that they found, and the memory that they made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's class is not annotated
        self.operations: list[tuple[Any, Any, Any, list[Tensor | None]]] = []
        self._found: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._made: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do the operation and remember it."""
        given = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if name in _HOST_READS:
            raise RuntimeError(f"{name} reads from the device, which is not possible while a graph is captured.")
        for tensor in _tensors((args, given)):
            place = _place(tensor)
            if place not in self._made and place not in self._found:
                storage = tensor.untyped_storage()
                self._found[place] = storage, storage.clone()  # type: ignore[no-untyped-call]
        out = func(*args, **given)
        made: list[Tensor | None] = []
        for leaf in tree_leaves(out):
            is_new = isinstance(leaf, Tensor) and _place(leaf) not in self._found and _place(leaf) not in self._made
            if is_new:
                self._made[_place(leaf)] = leaf.detach()
            made.append(leaf.detach() if is_new else None)
        self.operations.append((func, args, given, made))
        return out

    def undo(self) -> None:
        """Put back what was found, and spoil what was made."""
        for storage, before in self._found.values():
            storage.copy_(before)
        for tensor in self._made.values():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)


def _tensors(nest: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
