"""Checkpoints of runs whose state is spread over ranks, written by all of them through torch.distributed.checkpoint.

That library plans who writes what, once where several ranks hold the same, and tells every rank if one of them has
failed. Its own files are pickled; these are not: each rank writes a file of `pieces`, and the first writes everything
else, the manifest last.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor, distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from nvalchemi.errors import CheckpointWriteError
from nvalchemi.training.checkpoint.files import Attempt, attempt, not_written, write_file
from nvalchemi.training.checkpoint.manifest import SectionFile
from nvalchemi.training.checkpoint.pieces import Piece, write_pieces

__all__ = ["on_all_ranks", "saving_group", "write_sharded"]

_Done = TypeVar("_Done")
_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def saving_group() -> Any:
    """Return the group in which ranks save: of the host, and apart, so that a thread can save while they train.

    All ranks have to ask for it the first time.
    """
    world = distributed.group.WORLD
    if world not in _groups:
        _groups[world] = distributed.new_group(backend="gloo")
    return _groups[world]


def on_all_ranks(work: Callable[[], _Done]) -> _Done:
    """Do something on every rank, and return what came of it; where it fails on one, every rank raises.

    Raises
    ------
    CheckpointWriteError
        An ``OSError``: another rank failed; its message is repeated. Who fails raises its own error.
    """
    group, error, done = saving_group(), None, None
    try:
        done = work()
    except Exception as failure:  # raised again, once the others know
        error = failure
    told: list[str | None] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(told, None if error is None else f"{type(error).__name__}: {error}", group=group)
    if error is not None:
        raise error
    for rank, message in enumerate(told):
        if message is not None:
            raise CheckpointWriteError(f"The checkpoint was not written, because rank {rank} failed. {message}")
    return done  # type: ignore[return-value]  # somebody would have raised


def write_sharded(
    root: str | Path,
    sections: Mapping[str, Any],
    shards: Mapping[str, Tensor],
    *,
    kind: str,
    metadata: Mapping[str, Any],
    prepare: Callable[[], object] | None = None,
) -> None:
    """Write a checkpoint, on every rank at once; an earlier one stays whole until every rank is done.

    Parameters
    ----------
    root : path
        Where; a folder that all ranks see.
    sections : mapping of str to plain data
        What the first rank writes, as `write_sections` does.
    shards : mapping of str to torch.Tensor
        Sharded tensors by name, the same names on every rank.
    kind, metadata
        See `write_sections`.
    prepare : callable, optional
        Called by the first rank before anything is written; if it fails, the save has failed.

    Raises
    ------
    CheckpointWriteError
        An ``OSError``, on every rank: one of them could not write, and is named. The earlier checkpoint is as it was.
    """
    with ExitStack() as stack:
        writer = _Writer(
            Path(root), partial(_conclude, sections=sections, kind=kind, metadata=metadata), stack, prepare
        )
        with _one_failure_for_all(root):
            planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            save(dict(shards), storage_writer=writer, planner=planner, process_group=saving_group())
        if writer.attempt is not None:
            writer.attempt.remove_others()


@contextmanager
def _one_failure_for_all(root: str | Path) -> Iterator[None]:
    try:
        yield
    except CheckpointException as failed:
        rank, (error, _) = next(iter(sorted(failed.failures.items())))
        errno = error.errno if isinstance(error, OSError) else None
        why = not_written(error) if isinstance(error, OSError) else f"The checkpoint was not written: {error!r}"
        raise CheckpointWriteError(errno, f"{why} (rank {rank})", str(root)) from error
    except RuntimeError as error:  # what a process group raises when another rank is gone
        why = "The checkpoint was not written: another rank is gone, or does not answer"
        raise CheckpointWriteError(None, f"{why} ({error})", str(root)) from error


def _conclude(
    new: Attempt,
    files: Mapping[str, SectionFile],
    *,
    sections: Mapping[str, Any],
    kind: str,
    metadata: Mapping[str, Any],
) -> None:
    for name, one in files.items():
        path = new.folder / one.file
        if not path.is_file() or path.stat().st_size != one.size:
            raise FileNotFoundError(
                f"{path}, which the rank of {name} has written, is not there for the first rank; save into a folder "
                "on a file system that all ranks share"
            )
    new.complete(kind, {**new.write(sections), **files}, metadata)


class _Writer(StorageWriter):
    """What `torch.distributed.checkpoint` asks of a storage.

    Parameters
    ----------
    root : Path
        Where the checkpoint is to be.
    conclude : callable
        Called by the first rank with the attempt and all files, when every rank is done.
    stack : ExitStack
        Removes what was written, if it does not come to that.
    prepare : callable or None
        Called by the first rank before anything is written.
    """

    def __init__(
        self,
        root: Path,
        conclude: Callable[[Attempt, Mapping[str, SectionFile]], None],
        stack: ExitStack,
        prepare: Callable[[], object] | None,
    ) -> None:
        self._root, self._conclude, self._stack, self._prepare = root, conclude, stack, prepare
        self.attempt: Attempt | None = None  # of the first rank

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare, on the first rank."""
        if is_coordinator and self._prepare is not None:
            self._prepare()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder, and tell every rank of it, and its number."""
        self.attempt = self._stack.enter_context(attempt(self._root))
        return [replace(plan, storage_data=(self.attempt.folder, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what the plan says that this rank writes."""
        folder, rank = plan.storage_data
        pieces: Any = [(_piece(item), planner.resolve_data(item)) for item in plan.items]  # there are tensors only
        done: Future[list[WriteResult]] = Future()
        written = write_file(folder, f"{rank}.shards.safetensors", partial(write_pieces, pieces=pieces))
        done.set_result([WriteResult(item.index, written.size, (rank, written)) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint; only the first rank is asked to."""
        files = dict(result.storage_data for written in results for result in written[:1])
        assert self.attempt is not None
        self._conclude(self.attempt, {f"shards/{rank}": files[rank] for rank in sorted(files)})

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Take any."""
        return True

    def storage_meta(self) -> StorageMeta | None:
        """Return nothing: the manifest says it."""
        return None


def _piece(item: WriteItem) -> Piece:
    data = item.tensor_data
    assert data is not None  # there are tensors only
    chunk = data.chunk
    return Piece(item.index.fqn, tuple(data.size), tuple(chunk.offsets), tuple(chunk.sizes), data.properties.dtype)
