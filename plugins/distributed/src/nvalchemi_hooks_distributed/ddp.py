"""A replica of the model on every process."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn

from nvalchemi.hooks import TrainContext
from nvalchemi_hooks_distributed.spreading import SpreadingHook

__all__ = ["DDPHook"]


class DDPHook(SpreadingHook):
    """Trains a replica of each model on every process, with gradients averaged by ``DistributedDataParallel``.

    Started by ``torchrun``, it joins the process group (gloo on a CPU, nccl on CUDA), wraps the models before optimizers
    are built, and gives every rank its part of the data: a loader with a batch size of 16 makes 32 samples a step on two
    ranks. A process alone trains as without the hook. Untested on a GPU.

    Parameters
    ----------
    models : str or sequence of str, optional
        Which models; by default all that have an optimizer.
    find_unused_parameters, static_graph, gradient_as_bucket_view : bool
        As for ``DistributedDataParallel``.
    sync_buffers : bool
        Send the buffers of rank 0 to the others before each forward, in a broadcast of their own; nothing is sent of a
        model without buffers.
    bucket_cap_mb : float, optional
        The size of a bucket of gradients, in MiB; by default torch's.
    split_data : bool
        Give every rank its part of the data; False if the loaders do so already.
    seed : int
        From which samples are shuffled, the same on every rank.
    backend : str, optional
        ``"gloo"`` or ``"nccl"``.
    timeout : float
        Seconds that one rank waits for another.

    Raises
    ------
    HookConflictError
        A ``ValueError``, at SETUP: a model is wrapped already, has nothing to train, or is not there; or the processes
        cannot find each other.

    Examples
    --------
    >>> import torch
    >>> from nvalchemi.testing import tiny_batches, tiny_strategy
    >>> strategy = tiny_strategy(DDPHook())
    >>> strategy.run(tiny_batches(2))
    >>> strategy.step_count
    2
    """

    def __init__(
        self,
        *,
        models: str | Sequence[str] | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        sync_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
        bucket_cap_mb: float | None = None,
        split_data: bool = True,
        seed: int = 0,
        backend: str | None = None,
        timeout: float = 600.0,
    ) -> None:
        super().__init__(models=models, split_data=split_data, seed=seed, backend=backend, timeout=timeout)
        self.options = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "bucket_cap_mb": bucket_cap_mb,
        }
        self.sync_buffers = sync_buffers

    def spread(self, model: nn.Module, ctx: TrainContext) -> nn.Module:
        """Return the model, wrapped."""
        wrapper = nn.parallel.DistributedDataParallel
        options: dict[str, Any] = dict(self.options)
        if not self.sync_buffers:  # newer versions of torch have another name for it, and warn of the old one
            new = "forward_sync_buffers" in inspect.signature(wrapper).parameters
            options["forward_sync_buffers" if new else "broadcast_buffers"] = False
        return wrapper(model, **options)
