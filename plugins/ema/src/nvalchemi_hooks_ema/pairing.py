"""Which averaged tensor follows which live one, found by their names."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm

__all__ = ["Pair", "named_tensors", "pair_up", "prefix_between"]


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor of the average and the live one it follows.

    Attributes
    ----------
    name : str
        The name in the averaged module; the first one, where a tensor has several.
    average, live : torch.Tensor
        Parameters or buffers.
    blended : bool
        Averaged; otherwise copied.
    """

    name: str
    average: Tensor
    live: Tensor
    blended: bool


def pair_up(averaged: nn.Module, live: nn.Module, *, use_buffers: bool) -> list[Pair]:
    """Pair the parameters and buffers of two modules; a tensor with several names is there once.

    Parameters
    ----------
    averaged : torch.nn.Module
        The averaged module.
    live : torch.nn.Module
        The trained one. Its names may all have one prefix more, that of a wrapper such as ``module.``.
    use_buffers : bool
        Whether floating buffers are averaged. Integers, booleans and the unit vectors of spectral norm are always
        copied.

    Raises
    ------
    ValueError
        Names or shapes differ, a parameter is not initialised yet, or there is no parameter at all; the first is named.

    Examples
    --------
    >>> [(pair.name, pair.blended) for pair in pair_up(nn.BatchNorm1d(2, affine=False), nn.BatchNorm1d(2, affine=False),
    ...                                               use_buffers=True)]
    Traceback (most recent call last):
    ValueError: EMAHook has nothing to average: the model BatchNorm1d has no parameters.
    >>> [pair.name for pair in pair_up(nn.Linear(2, 1), nn.Linear(2, 1), use_buffers=True)]
    ['weight', 'bias']
    """
    averages, lives = named_tensors(averaged), named_tensors(live)
    if not any(True for _ in live.parameters()):
        raise ValueError(f"EMAHook has nothing to average: the model {type(live).__name__} has no parameters.")
    prefix = prefix_between(lives, averages) or ""
    _refuse_other_names(averages, lives, prefix)
    blended = {name for name, _ in averaged.named_parameters(remove_duplicate=False)}
    if use_buffers:
        blended |= {name for name, _ in averaged.named_buffers(remove_duplicate=False)} - set(_unit_vectors(averaged))
    pairs: dict[int, Pair] = {}
    for name, average in averages.items():
        follows = lives[prefix + name]
        _refuse_other_shape(name, average, follows)
        is_number = follows.is_floating_point() or follows.is_complex()
        pairs.setdefault(id(average), Pair(name, average, follows, is_number and name in blended))
    return list(pairs.values())


def prefix_between(longer: Collection[str], shorter: Collection[str]) -> str | None:
    """Return the prefix, ending with a dot, that makes one set of names the other; None if there is none.

    Examples
    --------
    >>> prefix_between(["module.weight", "module.bias"], ["weight", "bias"])
    'module.'
    >>> prefix_between(["weight"], ["weight"]) is None
    True
    """
    if not longer or len(longer) != len(shorter):
        return None
    first, first_shorter = min(longer), min(shorter)  # a common prefix leaves the order as it is
    prefix = first.removesuffix(first_shorter)
    return prefix if prefix.endswith(".") and {prefix + name for name in shorter} == set(longer) else None


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, under each of their names.

    Examples
    --------
    >>> list(named_tensors(nn.BatchNorm1d(1, affine=False)))
    ['running_mean', 'running_var', 'num_batches_tracked']
    """
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _unit_vectors(module: nn.Module) -> Iterator[str]:
    """Yield the names of spectral norm's buffers: an average of unit vectors is none."""
    for path, part in module.named_modules(remove_duplicate=False):
        names = [f"{hook.name}_{end}" for hook in part._forward_pre_hooks.values() if _is_old(hook) for end in "uv"]
        if type(part).__name__ == "_SpectralNorm":  # what nn.utils.parametrizations.spectral_norm registers; private
            names += ["_u", "_v"]
        yield from (f"{path}.{name}".lstrip(".") for name in names)


def _is_old(hook: object) -> bool:
    return isinstance(hook, SpectralNorm)


def _refuse_other_names(averages: Collection[str], lives: Collection[str], prefix: str) -> None:
    expected = {prefix + name for name in averages}
    missing, unknown = sorted(expected - set(lives)), sorted(set(lives) - expected)
    if missing or unknown:
        raise ValueError(
            f"EMAHook cannot match the averaged model with the live one: the live model lacks {_some(missing)} and has "
            f"{_some(unknown)} besides. Change a model before SETUP, or override "
            "EMAHook._build_averaged_model(source) to return a copy with the names of the live model."
        )


def _refuse_other_shape(name: str, average: Tensor, live: Tensor) -> None:
    if is_lazy(live):
        raise ValueError(
            f"EMAHook cannot average {name!r}: it is a lazy parameter that has no shape yet. "
            "Call the model once on a batch before training."
        )
    if is_lazy(average) or average.shape != live.shape:
        raise ValueError(
            f"EMAHook cannot average {name!r}: the live tensor has shape {tuple(live.shape)}, the averaged one "
            f"{'none yet' if is_lazy(average) else tuple(average.shape)}. "
            "A model whose shapes change while it is trained needs a new hook."
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return shown or "nothing"
