"""The copy of a model that becomes its average."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from nvalchemi_hooks_ema import kernels
from nvalchemi_hooks_ema.sharding import is_fully_sharded, sharded_copy

__all__ = ["ExponentialAverage", "averaged_copy", "finished"]


@dataclass(frozen=True, slots=True)
class ExponentialAverage:
    """The averaging function of an `AveragedModel`: torch's ``get_ema_multi_avg_fn``, but it pickles.

    Parameters
    ----------
    decay : float
        The weight of the average so far.

    Examples
    --------
    >>> average = torch.tensor([1.0])
    >>> ExponentialAverage(0.5)([average], [torch.tensor([3.0])], torch.tensor(1))
    >>> average
    tensor([2.])
    """

    decay: float

    @torch.no_grad()
    def __call__(self, averages: Sequence[Tensor], values: Sequence[Tensor], n_averaged: Tensor | int) -> None:
        """Blend what can be averaged and copy the rest, in place."""
        pairs = list(zip(averages, values, strict=True))
        blended = [pair for pair in pairs if pair[0].is_floating_point() or pair[0].is_complex()]
        copied = [pair for pair in pairs if not (pair[0].is_floating_point() or pair[0].is_complex())]
        for call in [*kernels.blending(blended, 1 - self.decay), *kernels.copying(copied)]:
            call()


def averaged_copy(source: nn.Module, *, decay: float, use_buffers: bool) -> AveragedModel:
    """Return an `AveragedModel` around a deep copy of a module, with nothing averaged yet.

    Unlike ``copy.deepcopy`` it takes modules that hold tensors with a graph (old-style weight norm and spectral norm,
    cached activations): the copy holds their values without the graph. Of a module that FSDP2 has sharded the copy is
    sharded in the same way.

    Parameters
    ----------
    source : torch.nn.Module
        The module, without wrappers; it is not changed.
    decay : float
        The weight of the average so far.
    use_buffers : bool
        Whether ``update_parameters``, should anybody call it, averages buffers too.

    Raises
    ------
    RuntimeError
        The module cannot be copied; the attribute that refuses is named.

    Examples
    --------
    >>> averaged_copy(nn.Linear(2, 1), decay=0.9, use_buffers=True).module
    Linear(in_features=2, out_features=1, bias=True)
    """
    averaged = AveragedModel(nn.Identity(), multi_avg_fn=ExponentialAverage(decay), use_buffers=use_buffers)
    averaged.module = _copied(source, sharded_copy if is_fully_sharded(source) else _deep_copy)
    return averaged


def finished(averaged: AveragedModel, builder: str) -> AveragedModel:
    """Check what a builder returned, and let the copied module adapt itself to being an average.

    Parameters
    ----------
    averaged : torch.optim.swa_utils.AveragedModel
        What the builder returned. If its module has ``modify_ema_methods()``, that is called.
    builder : str
        The name of the builder, for the message.

    Raises
    ------
    TypeError
        It is no `AveragedModel`.
    """
    if not isinstance(averaged, AveragedModel):
        raise TypeError(
            f"{builder} returned a {type(averaged).__name__}; "
            "return a torch.optim.swa_utils.AveragedModel around a copy of the model."
        )
    modify = getattr(averaged.module, "modify_ema_methods", None)
    if modify is not None:
        modify()
    return averaged


def _deep_copy(source: nn.Module) -> nn.Module:
    copied: nn.Module = copy.deepcopy(source, _values_of_graph_tensors(source))
    return copied


def _copied(source: nn.Module, way: Callable[[nn.Module], nn.Module]) -> nn.Module:
    try:
        return way(source)
    except Exception as error:  # whatever a module's attributes raise when copied; it stays the cause
        raise RuntimeError(
            f"EMAHook cannot copy the model {type(source).__name__}: {_what_refuses(source)} refuses a deep copy "
            f"({type(error).__name__}: {error}). Remove it before training, or override "
            "EMAHook._build_averaged_model(source) to return an AveragedModel around a second instance of the model."
        ) from error


def _values_of_graph_tensors(source: nn.Module) -> dict[int, Any]:
    """Return a memo in which every tensor with a graph is copied already, by its value alone."""
    return {
        id(tensor): tensor.detach().clone()
        for module in source.modules()
        for tensor in _tensors_in(list(vars(module).values()), set())
        if not tensor.is_leaf
    }


def _tensors_in(value: object, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple | set) and id(value) not in seen:
        seen.add(id(value))
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(part, seen)


def _what_refuses(source: nn.Module) -> str:
    for path, module in reversed(list(source.named_modules())):  # the innermost first
        memo = _values_of_graph_tensors(module)
        for name, value in vars(module).items():
            if name != "_modules" and not _copies(value, memo):
                return f"the attribute {f'{path}.{name}'.lstrip('.')!r}"
        if not _copies(module, memo):
            return f"the module {path or type(module).__name__!r}"
    return "something in it"


def _copies(value: object, memo: dict[int, Any]) -> bool:
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:  # the same attempt as in _deep_copy, repeated on a part, to find out which part it is
        return False
    return True
