"""Counting where the host waits for the device, exactly and on any machine."""

from __future__ import annotations

import sys
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["HostReads"]

_OPERATIONS = {"_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "unique"}
_COPIES = (Tensor.cpu, Tensor.numpy, Tensor.tolist)  # on a CPU they dispatch no operation
_CORE = str(Path(__file__).parents[1] / "training")


class HostReads:
    """Counts what makes the host wait: ``item()``, ``bool(tensor)``, ``tolist()``, ``cpu()``, ``equal``, ``nonzero``.

    Attributes
    ----------
    sites : list of str
        The line of each read.

    Examples
    --------
    >>> import torch
    >>> with HostReads() as reads:
    ...     _ = torch.ones(()).add(1).item()
    >>> len(reads.sites)
    1
    """

    def __init__(self) -> None:
        self.sites: list[str] = []
        self._modes = ExitStack()

    def __enter__(self) -> HostReads:
        self._modes.enter_context(_Operations(self.sites))
        self._modes.enter_context(_Copies(self.sites))
        return self

    def __exit__(self, *error: object) -> None:
        self._modes.close()


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, sites: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sites = sites

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in _OPERATIONS:
            self.sites.append(_caller())
        return func(*args, **(kwargs or {}))


class _Copies(TorchFunctionMode):
    def __init__(self, sites: list[str]) -> None:
        super().__init__()
        self.sites = sites

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _COPIES and not sys._getframe(1).f_code.co_filename.startswith(_CORE):
            self.sites.append(_caller())  # the core copies only what is on the host, or reads with an operation
        return func(*args, **(kwargs or {}))


def _caller() -> str:
    """Return the innermost line that is neither ours nor torch's."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename != __file__ and "/torch/" not in frame.filename.replace("\\", "/"):
            return f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno} {frame.line}"
    return "?"
