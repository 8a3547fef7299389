"""A whole run on disk: whatever has ``state_dict()`` and ``load_state_dict(state)``, a strategy above all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from nvalchemi.errors import NotPlainDataError
from nvalchemi.metadata import CORE_DISTRIBUTION, core_version
from nvalchemi.training.arguments import global_rank
from nvalchemi.training.checkpoint.files import write_sections
from nvalchemi.training.checkpoint.reading import open_sections
from nvalchemi.training.on_demand import OnDemand
from nvalchemi.training.plain import check_plain
from nvalchemi.training.saved_tensor import placed, take_out
from nvalchemi.training.shape import Each, misfit

__all__ = ["Resumable", "Snapshot", "load_training", "save_training", "take_snapshot"]

KIND = "training"
_RECORDS = Each(Each((str, None)))  # what the manifest says of hooks


class Resumable(Protocol):
    """Something that can be stopped and gone on with: a `TrainingStrategy`, or a loop of your own.

    One whose state is spread over ranks says so by an attribute ``is_sharded`` that is True: every rank then takes part
    in a save, and where the state has sharded tensors it is given `SavedTensor`s to be read in part.
    """

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state as plain data on the host, which later training does not change."""

    def load_state_dict(self, state: Mapping[str, Any], *, fresh: Collection[str] = ()) -> None:
        """Take over a state; check all of it before anything is changed."""


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at one moment, independent of what the run does next.

    Attributes
    ----------
    sections : mapping of str to plain data
        What goes into the files.
    metadata : mapping of str to JSON data
        What the manifest says of it.
    shards : mapping of str to torch.Tensor, or None
        What this rank holds of sharded tensors; None where the state is not spread over ranks.
    """

    sections: Mapping[str, Any]
    metadata: Mapping[str, Any]
    shards: Mapping[str, Tensor] | None = field(default=None)

    def write(self, root: str | Path, *, prepare: Callable[[], object] | None = None) -> None:
        """Write it; any thread may. See `save_training`.

        Parameters
        ----------
        root : path
            The folder of this checkpoint.
        prepare : callable, optional
            What comes before. Where every rank writes, the first does it, and if it fails, the save of all has failed.
        """
        if self.shards is None:
            if prepare is not None:
                prepare()
            write_sections(root, self.sections, kind=KIND, metadata=self.metadata)
            return
        from nvalchemi.training.checkpoint.sharded import write_sharded

        write_sharded(root, self.sections, self.shards, kind=KIND, metadata=self.metadata, prepare=prepare)


def take_snapshot(strategy: Resumable) -> Snapshot:
    """Copy the state of a run, to be written later or in another thread.

    Parameters
    ----------
    strategy : Resumable
        Between two batches, or at AFTER_BATCH, AFTER_EPOCH, AFTER_VALIDATION or AFTER_TRAINING: not inside a batch.

    Returns
    -------
    Snapshot
        With `Snapshot.write`. Tensors are copied to the host once; no random number is drawn. Where the state is spread
        over ranks, every rank has to take one, and to write it: each copies and writes what it holds.

    Raises
    ------
    NotPlainDataError
        A ``TypeError``: something in the state could not be loaded safely; its place is named.
    RuntimeError
        The strategy is inside a batch.
    """
    if not _is_sharded(strategy):
        return Snapshot(*_taken(strategy))
    from nvalchemi.training.checkpoint.sharded import on_all_ranks

    shards: dict[str, Tensor] = {}
    return Snapshot(*on_all_ranks(partial(_taken, strategy, shards)), shards)


def _is_sharded(strategy: Resumable) -> bool:
    return bool(getattr(strategy, "is_sharded", False))


def _taken(strategy: Resumable, shards: dict[str, Tensor] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return sections and metadata; sharded tensors go to `shards`."""
    state = strategy.state_dict()
    metadata = {"written_by": f"{CORE_DISTRIBUTION} {core_version()}", "parts": list(state), **_progress(state)}
    sections: dict[str, Any] = {}
    for part, value in state.items():
        if type(part) is not str:
            raise NotPlainDataError(f"The state has the key {part!r}, a {type(part).__name__}; use strings.")
        for name, section in _sections_of(part, value, metadata).items():
            if name in sections:
                raise NotPlainDataError(f"The state has {name!r} twice, in its part {part!r} too; rename one of them.")
            if shards is not None:
                section = take_out(section, name, shards)
            check_plain(section, name)
            sections[name] = section
    return sections, metadata


def save_training(root: str | Path, strategy: Resumable) -> None:
    """Save a run, so that it can go on as if it had not been stopped.

    An earlier checkpoint in `root` stays whole until the new one is complete, and is then removed. Of several ranks the
    first one writes, and the others return at once; where the state is spread over ranks, as FSDP2 spreads it, every
    rank has to call, and writes what it holds, into a folder that all ranks see.

    Parameters
    ----------
    root : path
        The folder of this checkpoint; it is made.
    strategy : Resumable
        See `take_snapshot`.

    Raises
    ------
    CheckpointWriteError
        An ``OSError``: the disk is full, for instance. The earlier checkpoint is as it was.
    NotPlainDataError, RuntimeError
        See `take_snapshot`.
    """
    if global_rank() == 0 or _is_sharded(strategy):
        take_snapshot(strategy).write(root)


def load_training(root: str | Path, strategy: Resumable, *, fresh: Collection[str] = ()) -> None:
    """Load a run that `save_training` saved, and go on with it by ``strategy.run(loader)``.

    Everything is checked before anything is changed. Sections are read one after the other, so that memory holds the
    run and one section. What was saved on some number of ranks can be loaded on any other: each rank reads what it is
    going to hold, and nothing is sent between ranks.

    Parameters
    ----------
    root : path
        The folder of the checkpoint.
    strategy : Resumable
        Made as it was when it was saved. Parts of the state it is given are read whenever it asks for them.
    fresh : collection of str
        Hooks, by `state_key`, that may be missing in the file: they start from scratch.

    Raises
    ------
    CheckpointError
        What is wrong with the file, or does not fit the strategy: a class for each, see `nvalchemi.errors`.
    """
    with open_sections(root, kind=KIND) as (sections, manifest):
        try:
            known = sections if hasattr(strategy, "is_sharded") else _whole(sections)
            strategy.load_state_dict(_state_of(known, manifest.metadata), fresh=fresh)
        except Exception as error:  # noted and raised again
            error.add_note(f"While loading the checkpoint in {Path(root)}.")
            raise


def _whole(sections: OnDemand) -> OnDemand:
    """Return sections whose tensors are read whole, for who does not know of sharded ones."""
    return OnDemand({name: partial(lambda name: placed(sections[name]), name) for name in sections})


def _sections_of(part: str, value: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return a part as it is, or models and hooks one by one, so that each stands in the manifest by its name."""
    if part == "models" and value and not misfit(value, Each(object), part):
        return {f"{part}/{name}": entry for name, entry in value.items()}
    if part == "hooks" and not misfit(value, Each(Each(object)), part):
        records = {key: {k: v for k, v in hook.items() if k != "state"} for key, hook in value.items()}
        if not misfit(records, _RECORDS, part):
            metadata[part] = records
            return {f"{part}/{key}": hook["state"] for key, hook in value.items() if "state" in hook}
    return {part: value}


def _state_of(sections: OnDemand, metadata: Mapping[str, Any]) -> OnDemand:
    """Return sections, and the records of hooks, in the form that `state_dict` gave them."""
    parts: list[str] = metadata.get("parts", [])
    read = {name: partial(sections.__getitem__, name) for name in sections}
    state: dict[str, Any] = {}
    for part in parts:
        if part in read:
            state[part] = read[part]
            continue
        begin = f"{part}/"
        own = [name for name in read if name.startswith(begin) and name not in parts]
        entries: dict[str, Any] = {name.removeprefix(begin): read[name] for name in own}
        if part == "hooks":
            states = {key: {"state": one} for key, one in entries.items()}
            entries = {key: OnDemand({**one, **states.get(key, {})}) for key, one in metadata.get(part, {}).items()}
        state[part] = OnDemand(entries)
    return OnDemand(state)


def _progress(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a person wants to know of a checkpoint without opening it: its counters, if it has such."""
    run = state.get("run")
    counters = run.get("counters") if isinstance(run, Mapping) else None
    return {} if misfit(counters, Each(int), "counters") else {"progress": dict(counters or {})}
