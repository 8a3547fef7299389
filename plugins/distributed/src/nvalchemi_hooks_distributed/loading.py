"""The part of the data that one rank sees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from nvalchemi.errors import HookConflictError

__all__ = ["EveryNth", "Stride", "part_of", "samplers_of"]

_KEPT = (
    "batch_size", "collate_fn", "drop_last", "generator", "multiprocessing_context", "num_workers", "persistent_workers",
    "pin_memory", "pin_memory_device", "prefetch_factor", "timeout", "worker_init_fn", "in_order",
)  # fmt: skip


def part_of(loader: Any, rank: int, ranks: int, *, training: bool, even: bool, seed: int) -> Iterable[Any]:
    """Return what one rank sees of a loader.

    A ``DataLoader`` over indexed data gets a sampler that draws this rank's samples only. A ``DistributedSampler`` that
    it has already is left alone. Of any other iterable, which every rank reads in the same order, every n-th batch.

    Parameters
    ----------
    loader : iterable
        As it would be given to one process.
    rank, ranks : int
        Whose part, and of how many.
    training : bool
        Whether it is trained on.
    even : bool
        Every rank gets as many batches: samples are repeated, or left out (``drop_last``), and so are last batches of
        an iterable. Without it, which only serves evaluation, each sample is seen once.
    seed : int
        From which samples are shuffled, together with the number of the epoch.

    Raises
    ------
    HookConflictError
        A ``ValueError``: the loader draws in a way of its own that cannot be divided.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return EveryNth(loader, rank, ranks, even=even)
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        raise _refusal(loader, f"its batch_sampler is a {type(loader.batch_sampler).__name__}")
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):
        if (sampler.num_replicas, sampler.rank) != (ranks, rank):
            raise _refusal(
                loader,
                f"its DistributedSampler is that of rank {sampler.rank} of {sampler.num_replicas}, but this is rank "
                f"{rank} of {ranks}",
            )
        return loader
    shuffles = type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None
    if not shuffles and type(sampler) is not SequentialSampler:
        raise _refusal(loader, f"its sampler is a {type(sampler).__name__}")
    data: Any = loader.dataset
    own: Sampler[int]
    if even:
        drop = bool(loader.drop_last)
        own = DistributedSampler(data, ranks, rank, shuffle=shuffles and training, seed=seed, drop_last=drop)
    else:
        own = Stride(len(data), rank, ranks)
    return _with_sampler(loader, own)


def samplers_of(loader: Any) -> list[Any]:
    """Return the samplers of a loader that want to know the epoch."""
    parts = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    parts.append(getattr(parts[-1], "sampler", None))
    found: list[Any] = []
    for part in parts:
        if callable(getattr(part, "set_epoch", None)) and all(part is not one for one in found):
            found.append(part)
    return found


class Stride(Sampler[int]):
    """Every n-th place, in order, none of them twice.

    Examples
    --------
    >>> list(Stride(5, rank=1, ranks=2))
    [1, 3]
    """

    def __init__(self, length: int, rank: int, ranks: int) -> None:
        self._places = range(rank, length, ranks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class EveryNth:
    """Every n-th batch of an iterable; a last round that does not go round is left out if all get as many.

    Examples
    --------
    >>> list(EveryNth("abcde", 1, 2, even=True)), list(EveryNth("abcde", 0, 2, even=False))
    (['b', 'd'], ['a', 'c', 'e'])
    """

    def __init__(self, loader: Iterable[Any], rank: int, ranks: int, *, even: bool) -> None:
        self.loader, self._rank, self._ranks, self._even = loader, rank, ranks, even

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        while round_ := list(islice(batches, self._ranks)):
            if len(round_) == self._ranks or (not self._even and len(round_) > self._rank):
                yield round_[self._rank]

    def __len__(self) -> int:
        whole, rest = divmod(len(self.loader), self._ranks)  # type: ignore[arg-type]  # TypeError, as of the loader
        return whole + (not self._even and rest > self._rank)

    def __getattr__(self, name: str) -> Any:
        """Ask the loader, which may keep its place itself, or have something to be told of an epoch."""
        if name.startswith("_") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


def _with_sampler(loader: DataLoader[Any], sampler: Sampler[int]) -> DataLoader[Any]:
    kept = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    if not kept.get("pin_memory_device"):
        kept.pop("pin_memory_device", None)  # torch warns of it where it is given
    try:
        return type(loader)(loader.dataset, sampler=sampler, **kept)
    except TypeError as error:  # a class of the user's own, made in another way
        raise _refusal(loader, f"a {type(loader).__name__} cannot be made again ({error})") from error


def _refusal(loader: object, why: str) -> HookConflictError:
    return HookConflictError(
        f"This {type(loader).__name__} cannot be divided among ranks: {why}; give the loader a "
        "torch.utils.data.DistributedSampler, or divide the data yourself and say split_data=False."
    )
