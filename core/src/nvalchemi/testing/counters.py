"""What a step of torch code costs, in exact counts that hold on any machine."""

from __future__ import annotations

import os
import traceback
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["StepCost"]

_HOST_READS = {"_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero"}
_FREE = {"alias", "as_strided", "detach", "expand", "permute", "reshape", "select", "slice", "squeeze", "t"} | {
    "transpose", "unsqueeze", "view", "view_as_real", "_unsafe_view", "_record_function_enter_new",
    "_record_function_exit",
}  # fmt: skip
_OVERWRITING = {"copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_"}
_MAKING = {"empty", "empty_like", "full", "ones", "zeros", "zeros_like"}
_NO_SITES = (os.path.dirname(torch.__file__), os.path.dirname(__file__), "<")  # torch's code, ours, and none


class StepCost(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class is not annotated
    """Counts the operations, the bytes and the host reads of everything that torch dispatches inside the block.

    An operation stands for a launch; views are free. Bytes are those that each operation reads and writes when nothing
    stays in a cache. A host read is an operation that makes the host wait for a device; on a CPU tensor it counts just
    as well, except ``Tensor.tolist()`` of a 0-dim one, which dispatches nothing there.

    Attributes
    ----------
    ops, bytes, host_reads : int
        The sums.
    ops_by_name, bytes_by_name : collections.Counter
        The same by operation, ``"_fused_adamw_"`` for example.
    host_read_sites : list of str
        File, line and code of every host read.

    Notes
    -----
    It sees neither ``Tensor.cpu()`` on a CPU tensor, nor what a compiled kernel reads by itself.

    Examples
    --------
    >>> import torch
    >>> with StepCost() as cost:
    ...     _ = torch.ones(8).add_(1.0).sum().item()
    >>> cost.ops, cost.bytes, cost.host_reads
    (3, 132, 1)
    >>> cost.ops_by_name["add_"]
    1
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops = self.bytes = self.host_reads = 0
        self.ops_by_name: Counter[str] = Counter()
        self.bytes_by_name: Counter[str] = Counter()
        self.host_read_sites: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do the operation and count it."""
        given = kwargs or {}
        out = func(*args, **given)
        name = func._schema.name.partition("::")[2]
        if name in _HOST_READS:
            self.host_reads += 1
            self.host_read_sites.append(_site())
        elif name not in _FREE:
            moved = _moved(func, name, args, given, out)
            self.ops += 1
            self.bytes += moved
            self.ops_by_name[name] += 1
            self.bytes_by_name[name] += moved
        return out


def _moved(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> int:
    """Return the bytes that an operation reads and writes."""
    arguments = func._schema.arguments
    values = [*args, *(kwargs.get(argument.name) for argument in arguments[len(args) :])]
    total, in_place, seen = 0, False, set[int]()
    for argument, value in zip(arguments, values, strict=True):
        tensors = [one for one in tree_leaves(value) if isinstance(one, Tensor)]
        size = sum(_nbytes(one) for one in tensors)
        written = argument.alias_info is not None and argument.alias_info.is_write
        in_place |= written
        if name not in _MAKING and not (written and name in _OVERWRITING):
            total += sum(_nbytes(one) for one in tensors if id(one) not in seen)  # what is given twice is read once
        if written and _is_written(name, argument.name, kwargs):
            total += size
        seen.update(map(id, tensors))
    return total if in_place else total + sum(_nbytes(one) for one in tree_leaves(out) if isinstance(one, Tensor))


def _is_written(name: str, argument: str, kwargs: Any) -> bool:
    """Return whether an operation really writes what its schema lets it write."""
    if argument == "state_steps" and name.startswith("_fused"):
        return False
    return argument != "grads" or kwargs.get("grad_scale") is not None  # written back only when they are divided


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _site() -> str:
    """Return the latest line that is neither torch's nor of this package."""
    outside = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(_NO_SITES)]
    return f"{outside[-1].filename}:{outside[-1].lineno} {outside[-1].line}" if outside else ""
