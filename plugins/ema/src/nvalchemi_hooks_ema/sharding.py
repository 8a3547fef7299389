"""Averages of models that FSDP2 has spread over ranks: a copy spread in the same way, each rank keeping its part of it.

Nothing here communicates: a rank copies and averages what it holds. The averaged model is gathered layer by layer when
somebody calls it, as any model of FSDP2 is.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi.training import is_sharded, local_part

__all__ = ["copy_local_values", "is_fully_sharded", "put_back", "refuse_other_layout", "sharded_copy"]

_COMPOSABLE = "__composable_api_"  # under such names torch keeps what it has made of a module
_FSDP = "torch.distributed.fsdp"


def is_fully_sharded(source: nn.Module) -> bool:
    """Return whether ``fully_shard`` was called on a module, or on some within it.

    Examples
    --------
    >>> is_fully_sharded(nn.Linear(1, 1))
    False
    """
    return bool(_sharded_modules(source))


def put_back(module: nn.Module) -> None:
    """Have a module hold the shards of its parameters, where a call has left the gathered ones in it."""
    for part in _sharded_modules(module):
        part.reshard()


def sharded_copy(source: nn.Module) -> nn.Module:
    """Return a copy of a module, spread over the ranks as the module is; parameters are frozen, and up to date.

    What ``fully_shard`` was told is taken from the module: which modules form a group, the mesh, along which dimension
    each parameter is cut, which parameters are left alone, and the policies of precision and offloading.

    Parameters
    ----------
    source : torch.nn.Module
        A module on which, or within which, ``fully_shard`` was called. It is not changed.

    Raises
    ------
    ValueError
        It is spread in another way besides, by tensor parallelism for example.
    """
    put_back(source)
    twins: dict[int, Any] = {id(p): _whole_on_meta(name, p) for name, p in source.named_parameters() if is_sharded(p)}
    parts = list(reversed(_sharded_modules(source)))  # the innermost first, as fully_shard asks for
    cuts = {id(twins[id(p)]): p.placements[-1] for p in source.parameters() if is_sharded(p)}
    for part in parts:
        _copy_bare(part, twins)
    copied: nn.Module = copy.deepcopy(source, twins) if id(source) not in twins else twins[id(source)]
    for group in _groups(parts):
        _shard_alike(group, twins, cuts)
    _fill(copied, source)
    return copied


@torch.no_grad()
def copy_local_values(averaged: nn.Module, source: nn.Module) -> None:
    """Copy what this rank holds of each parameter and buffer of a module into its copy."""
    values = dict(_named_tensors(source))
    for name, tensor in _named_tensors(averaged):
        local_part(tensor).copy_(local_part(values[name]))


def refuse_other_layout(name: str, average: Tensor, live: Tensor) -> None:
    """Refuse an average whose parts are not the parts of the live tensor.

    Raises
    ------
    ValueError
        The name, and how each of the two is spread over the ranks.
    """
    if _layout(average) != _layout(live):
        raise ValueError(
            f"EMAHook cannot average {name!r} shard by shard: the live tensor is {_in_words(live)}, the averaged one "
            f"{_in_words(average)}. Shard the model before SETUP is over, or override "
            "EMAHook._build_averaged_model(source) to return a copy that is sharded as the model is."
        )


def _sharded_modules(source: nn.Module) -> list[Any]:
    known: Any = sys.modules.get(_FSDP)
    kind = getattr(known, "FSDPModule", None)
    return [] if kind is None else [module for module in source.modules() if isinstance(module, kind)]


def _whole_on_meta(name: str, parameter: Tensor) -> nn.Parameter:
    """Return a parameter of the whole shape without memory."""
    *others, last = parameter.placements  # type: ignore[attr-defined]
    if len(others) > 1 or not last.is_shard() or not all(one.is_replicate() for one in others):
        raise ValueError(
            f"EMAHook can copy what fully_shard alone has sharded, but {name!r} is {_in_words(parameter)}. Override "
            "EMAHook._build_averaged_model(source) to return an AveragedModel around a second instance of the model "
            "that is sharded in the same way."
        )
    return nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad)


def _copy_bare(part: nn.Module, twins: dict[int, Any]) -> None:
    """Copy a sharded module as it was before, of its own class and without the hooks of FSDP2."""
    fsdp: Any = sys.modules[_FSDP]
    kind: Any = next(kind for kind in type(part).__mro__ if not issubclass(kind, fsdp.FSDPModule))
    twins[id(part)] = bare = kind.__new__(kind)
    vars(bare).update(copy.deepcopy(_without_fsdp(vars(part)), twins))


def _without_fsdp(attributes: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in attributes.items() if not name.startswith(_COMPOSABLE)}
    for name, value in kept.items():
        if name.endswith("_hooks") and isinstance(value, dict):
            kept[name] = type(value)((key, hook) for key, hook in value.items() if not _is_of_fsdp(hook))
    return kept


def _is_of_fsdp(hook: Any) -> bool:
    hook = getattr(hook, "func", hook)
    owner = getattr(hook, "__self__", None)
    return (getattr(hook, "__module__", None) or "").startswith(_FSDP) or type(owner).__module__.startswith(_FSDP)


def _groups(parts: Iterable[Any]) -> list[list[Any]]:
    """Return modules that were given to one call of ``fully_shard`` together."""
    groups: dict[int, list[Any]] = {}
    for part in parts:
        groups.setdefault(id(part._get_fsdp_state()), []).append(part)
    return list(groups.values())


def _shard_alike(group: list[Any], twins: Mapping[int, Any], cuts: Mapping[int, Any]) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard

    first = next((p for part in group for p in part.parameters() if is_sharded(p)), None)
    state = group[0]._get_fsdp_state()  # the policies have no public name
    own = [getattr(one, "offload_policy", None) for one in (getattr(state, "_fsdp_param_group", None),)]
    fully_shard(
        [twins[id(part)] for part in group] if len(group) > 1 else twins[id(group[0])],
        mesh=None if first is None else first.device_mesh,
        reshard_after_forward=True,  # or a call of the average would leave gathered weights that no update reaches
        shard_placement_fn=lambda parameter: cuts.get(id(parameter)),
        mp_policy=getattr(state, "_mp_policy", None) or MixedPrecisionPolicy(),
        offload_policy=own[0] or OffloadPolicy(),
        ignored_params={twins.get(id(p), p) for part in group for p in part.parameters() if not is_sharded(p)},
    )


def _fill(copied: nn.Module, source: nn.Module) -> None:
    """Give the copy memory where the source has it, and its values."""
    device = next(local_part(p).device for p in source.parameters() if is_sharded(p))
    copied.to_empty(device=device)
    copied.requires_grad_(False)
    copy_local_values(copied, source)


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _layout(tensor: Tensor) -> Any:
    return (tensor.device_mesh, tuple(tensor.placements)) if is_sharded(tensor) else None


def _in_words(tensor: Tensor) -> str:
    if not is_sharded(tensor):
        return "whole on every rank"
    return f"spread as {', '.join(map(str, tensor.placements))} over the mesh {tuple(tensor.device_mesh.shape)}"
