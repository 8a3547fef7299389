"""The model sharded over the processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed, nn

from nvalchemi.errors import HookConflictError
from nvalchemi.hooks import TrainContext
from nvalchemi_hooks_distributed.spreading import SpreadingHook

__all__ = ["FSDPHook"]

Chooses = Callable[[str, nn.Module], bool]


class FSDPHook(SpreadingHook):
    """Shards each model over the processes by ``fully_shard`` (FSDP2).

    Each rank holds a part and gathers what it needs. Parameters, gradients and optimizer state are spread; names stay
    those of the bare model. A process alone trains as without the hook. Untested on a GPU.

    Parameters
    ----------
    models : str or sequence of str, optional
        Which models; by default all that have an optimizer.
    shard : sequence of str, or callable
        Which children are gathered by themselves: the names of their classes, or ``shard(name, module) -> bool``.
        Without any the model is gathered as a whole, and saves memory for gradients and optimizer state only.
    mesh : sequence of int, optional
        ``(replicas, shards)``: shard within groups of ranks, and replicate over the groups. By default one group.
    param_dtype, reduce_dtype : str, optional
        In which dtype parameters are gathered and gradients reduced, ``"bfloat16"`` for example; by default their own.
    reshard_after_forward : bool
        Let go of gathered parameters between forward and backward.
    split_data, seed, backend, timeout
        As for `DDPHook`.

    Raises
    ------
    HookConflictError
        A ``ValueError``, at SETUP: a model is wrapped already, has nothing to train, or is not there; `shard` chooses
        nothing; `mesh` does not have as many places as there are ranks.

    Examples
    --------
    >>> from nvalchemi.testing import tiny_batches, tiny_strategy
    >>> strategy = tiny_strategy(FSDPHook(shard=["Linear"]))
    >>> strategy.run(tiny_batches(2))
    >>> strategy.step_count
    2
    """

    evaluates_alone = False  # every forward gathers

    def __init__(
        self,
        *,
        models: str | Sequence[str] | None = None,
        shard: Sequence[str] | Chooses = (),
        mesh: Sequence[int] | None = None,
        param_dtype: str | None = None,
        reduce_dtype: str | None = None,
        reshard_after_forward: bool = True,
        split_data: bool = True,
        seed: int = 0,
        backend: str | None = None,
        timeout: float = 600.0,
    ) -> None:
        super().__init__(models=models, split_data=split_data, seed=seed, backend=backend, timeout=timeout)
        if isinstance(shard, str):
            raise TypeError(f"FSDPHook(shard={shard!r}): give a list of names of classes, [{shard!r}].")
        self.shard = shard if callable(shard) else tuple(shard)
        self.mesh = None if mesh is None else tuple(mesh)
        if self.mesh is not None and (len(self.mesh) != 2 or not all(type(n) is int and n > 0 for n in self.mesh)):
            raise ValueError(f"FSDPHook(mesh={mesh!r}): give two numbers, (replicas, shards).")
        self.param_dtype, self.reduce_dtype = param_dtype, reduce_dtype
        self._precision()  # a wrong name is found now
        self.reshard_after_forward = reshard_after_forward

    def spread(self, model: nn.Module, ctx: TrainContext) -> nn.Module:
        """Shard the model in place, children first, and return it."""
        from torch.distributed.fsdp import fully_shard

        assert ctx.device is not None
        with torch.no_grad():  # each rank keeps a part of what it has, so all have to have the same
            for tensor in (*model.parameters(), *model.buffers()):
                distributed.broadcast(tensor.detach(), 0)
        options: dict[str, Any] = {
            "mesh": self._device_mesh(ctx.device),
            "mp_policy": self._precision(),
            "reshard_after_forward": self.reshard_after_forward,
        }
        for child in self._children(model):
            fully_shard(child, **options)
        fully_shard(model, **options)
        return model

    def _children(self, model: nn.Module) -> list[nn.Module]:
        named = [(name, module) for name, module in model.named_modules() if module is not model]
        if callable(self.shard):
            chosen = [module for name, module in named if self.shard(name, module)]
        else:
            kinds = {type(module).__name__ for _, module in named}
            for name in self.shard:
                if name not in kinds:
                    others = f"only of {', '.join(sorted(kinds))}" if kinds else "and no other; leave out shard"
                    raise HookConflictError(
                        f"FSDPHook(shard={list(self.shard)!r}): the {type(model).__name__} has no child of the class "
                        f"{name!r}, {others}."
                    )
            chosen = [module for _, module in named if type(module).__name__ in self.shard]
        return list(reversed(chosen))  # what is inside another comes first

    def _device_mesh(self, device: torch.device) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        world = distributed.get_world_size()
        if self.mesh is None:
            return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
        replicas, shards = self.mesh
        if replicas * shards != world:
            raise HookConflictError(
                f"FSDPHook(mesh={self.mesh!r}) has {replicas * shards} places, but there are {world} ranks; the "
                "product of the two numbers is the number of ranks."
            )
        return init_device_mesh(device.type, self.mesh, mesh_dim_names=("replicate", "shard"))

    def _precision(self) -> Any:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        return MixedPrecisionPolicy(
            param_dtype=_dtype("param_dtype", self.param_dtype), reduce_dtype=_dtype("reduce_dtype", self.reduce_dtype)
        )


def _dtype(option: str, name: str | None) -> torch.dtype | None:
    dtype = None if name is None else getattr(torch, str(name).removeprefix("torch."), None)
    if name is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f'FSDPHook({option}={name!r}): give the name of a floating dtype, "bfloat16" for example.')
    return dtype
