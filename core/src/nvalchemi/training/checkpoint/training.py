"""A whole run on disk: whatever has ``state_dict()`` and ``load_state_dict(state)``, a strategy above all."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from nvalchemi.metadata import CORE_DISTRIBUTION, core_version
from nvalchemi.training.arguments import global_rank
from nvalchemi.training.checkpoint.files import write_sections
from nvalchemi.training.checkpoint.reading import open_sections
from nvalchemi.training.on_demand import OnDemand
from nvalchemi.training.plain import check_plain

__all__ = ["Resumable", "Snapshot", "load_training", "save_training", "take_snapshot"]

KIND = "training"
_SPLIT = ("models", "hooks")  # parts with one section an entry, so that each stands in the manifest by its name


class Resumable(Protocol):
    """Something that can be stopped and gone on with: a `TrainingStrategy`, or a loop of your own."""

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
    """

    sections: Mapping[str, Any]
    metadata: Mapping[str, Any]

    def write(self, root: str | Path) -> None:
        """Write it; any thread may. See `save_training`."""
        write_sections(root, self.sections, kind=KIND, metadata=self.metadata)


def take_snapshot(strategy: Resumable) -> Snapshot:
    """Copy the state of a run, to be written later or in another thread.

    Parameters
    ----------
    strategy : Resumable
        Between two batches, or at AFTER_BATCH, AFTER_EPOCH, AFTER_VALIDATION or AFTER_TRAINING: not inside a batch.

    Returns
    -------
    Snapshot
        With `Snapshot.write`. Tensors are copied to the host once; no random number is drawn.

    Raises
    ------
    NotPlainDataError
        A ``TypeError``: something in the state could not be loaded safely; its place is named.
    RuntimeError
        The strategy is inside a batch.
    """
    state = dict(strategy.state_dict())
    hooks = {key: {k: v for k, v in hook.items() if k != "state"} for key, hook in state.get("hooks", {}).items()}
    state["hooks"] = {key: hook["state"] for key, hook in state.get("hooks", {}).items() if "state" in hook}
    sections: dict[str, Any] = {}
    for part, value in state.items():
        if part in _SPLIT:
            sections.update({f"{part}/{name}": entry for name, entry in value.items()})
        else:
            sections[part] = value
    for name, section in sections.items():
        check_plain(section, name)
    metadata = {"written_by": f"{CORE_DISTRIBUTION} {core_version()}", "hooks": hooks, **_progress(state)}
    return Snapshot(sections, metadata)


def save_training(root: str | Path, strategy: Resumable) -> None:
    """Save a run, so that it can go on as if it had not been stopped.

    An earlier checkpoint in `root` stays whole until the new one is complete, and is then removed. Of several ranks the
    first one writes, and the others return at once.

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
    if global_rank() == 0:
        take_snapshot(strategy).write(root)


def load_training(root: str | Path, strategy: Resumable, *, fresh: Collection[str] = ()) -> None:
    """Load a run that `save_training` saved, and go on with it by ``strategy.run(loader)``.

    Everything is checked before anything is changed. Sections are read one after the other, so that memory holds the
    run and one section.

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
            strategy.load_state_dict(_state_of(sections, manifest.metadata.get("hooks", {})), fresh=fresh)
        except Exception as error:  # noted and raised again
            error.add_note(f"While loading the checkpoint in {Path(root)}.")
            raise


def _state_of(sections: OnDemand, hooks: Mapping[str, Mapping[str, Any]]) -> OnDemand:
    """Return sections and records of hooks in the form that `state_dict` gave them."""
    state: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {"models": {}, "hooks": {key: dict(record) for key, record in hooks.items()}}
    for name in sections:
        part, _, entry = name.partition("/")
        read = partial(sections.__getitem__, name)
        if part == "hooks":
            parts[part].setdefault(entry, {})["state"] = read
        elif part in _SPLIT:
            parts[part][entry] = read
        else:
            state[part] = read
    parts["hooks"] = {key: OnDemand(record) for key, record in parts["hooks"].items()}
    return OnDemand({**state, **{part: OnDemand(entries) for part, entries in parts.items()}})


def _progress(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a person wants to know of a checkpoint without opening it: its plain counters."""
    return {"progress": dict(state.get("run", {}).get("counters", {}))}
