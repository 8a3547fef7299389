"""Counting where the host waits for the device, exactly and on any machine."""

from __future__ import annotations

import sys
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from nvalchemi.testing.counters import StepCost

__all__ = ["HostReads"]

_COPIES = (Tensor.cpu, Tensor.numpy, Tensor.tolist)  # on a CPU they dispatch no operation
_CORE = str(Path(__file__).parents[1] / "training")


class HostReads:
    """Counts what makes the host wait: the host reads of `StepCost`, and copies to the host that a CPU does not see.

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
        self._cost, self._copies = StepCost(), _Copies()
        self._modes = ExitStack()

    @property
    def sites(self) -> list[str]:
        """File, line and code of every read."""
        return [*self._cost.host_read_sites, *self._copies.sites]

    def __enter__(self) -> HostReads:
        self._modes.enter_context(self._cost)
        self._modes.enter_context(self._copies)
        return self

    def __exit__(self, *error: object) -> None:
        self._modes.close()


class _Copies(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.sites: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The core copies only what is on the host, or else reads with an operation.
        if func in _COPIES and not sys._getframe(1).f_code.co_filename.startswith(_CORE):
            frame = traceback.extract_stack()[-2]
            self.sites.append(f"{frame.filename}:{frame.lineno} {frame.line}")
        return func(*args, **(kwargs or {}))
