"""Whether the ranks of a run are set up alike: said once, on every rank, before anything waits for another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nvalchemi.errors import HookConflictError, RanksDifferError
from nvalchemi.training.arguments import gathered, length_of, world_size
from nvalchemi.training.hook_states import NamedHook

__all__ = ["refuse_other_hooks", "refuse_other_lengths", "refuse_other_places"]


def refuse_other_hooks(hooks: Sequence[NamedHook]) -> None:
    """Compare the active hooks over all ranks: key, class, distribution and version. With one rank nothing is sent.

    Raises
    ------
    HookConflictError
        A ``ValueError``, on every rank: which rank has what the first has not, and the other way round.
    """
    if world_size() == 1:
        return
    everyone = gathered([_said(one) for one in hooks])
    first, differences = everyone[0], []
    for rank, own in enumerate(everyone):
        more, less = [one for one in own if one not in first], [one for one in first if one not in own]
        if more or less:
            has = f"has {', '.join(more)}" if more else ""
            lacks = f"lacks {', '.join(less)}" if less else ""
            differences.append(f"rank {rank} {' and '.join(filter(None, (has, lacks)))}")
        elif own != first:
            differences.append(f"rank {rank} has the same in another order: {', '.join(own)}")
    if differences:
        raise HookConflictError(
            f"The ranks have different hooks: other than rank 0, {'; '.join(differences)}. Give every rank the same "
            "hooks, from the same versions; let a hook that only rank 0 needs look at ctx.global_rank."
        )


def refuse_other_lengths(loader: Iterable[Any]) -> None:
    """Compare the lengths of the ranks' loaders.

    Raises
    ------
    RanksDifferError
        A ``RuntimeError``, on every rank, with the length of each.
    """
    if world_size() == 1:
        return
    lengths = gathered(length_of(loader))
    if len(set(lengths)) > 1:
        each = ", ".join(f"{length} on rank {rank}" for rank, length in enumerate(lengths))
        raise RanksDifferError(
            f"The loaders of the ranks differ in their number of batches ({each}; None is unknown), so that some would "
            "wait for others that have finished; give every rank as many, as a DistributedSampler does."
        )


def refuse_other_places(**place: int) -> None:
    """Compare where the ranks are in their runs, and how far they are to go; the words name each number.

    Raises
    ------
    RanksDifferError
        A ``RuntimeError``, on every rank, with the numbers of each.
    """
    if world_size() == 1:
        return
    places = gathered(place)
    if any(one != place for one in places):
        each = "; ".join(
            f"rank {rank}: {', '.join(f'{word} {number}' for word, number in one.items())}"
            for rank, one in enumerate(places)
        )
        raise RanksDifferError(
            f"The ranks are not at the same place in their runs ({each}); load a checkpoint on every rank, and give "
            "all the same num_steps or num_epochs."
        )


def _said(one: NamedHook) -> str:
    origin = one.provenance
    source = f"{origin.distribution} {origin.version}" if origin else "no distribution"
    return f"{one.key} ({type(one.hook).__name__}, {source})"
