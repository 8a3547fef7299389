"""Where in the data a run is, so that another process can go on with the very next batch."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from nvalchemi.errors import CheckpointMismatchError, CheckpointWarning
from nvalchemi.training.arguments import length_of, world_size
from nvalchemi.training.look_ahead import Batches
from nvalchemi.training.plain import host_copy
from nvalchemi.training.rng import capture_rng, random_numbers_kept, restore_rng

if TYPE_CHECKING:
    from nvalchemi.hooks.context import TrainContext

__all__ = ["DataPosition"]

_OWN = "own"  # the state of a loader that keeps its place itself
_TORN = (
    "The latest batch was left in its middle by an error, so this state is not that of a run between two batches: "
    "random numbers, buffers and kept gradients may have moved on. It can be gone on with; an uninterrupted run would "
    "differ."
)
_PARTS = ("", "sampler", "batch_sampler", "batch_sampler.sampler")  # of a DataLoader, where it keeps generators


class DataPosition:
    """The pass over the loader that is under way, and the random numbers it began with.

    A pass is found again by beginning it with the same random numbers and passing over the batches that were trained
    on; after that the random numbers are those of the moment of saving. A loader that is no ``DataLoader`` and has
    ``state_dict()`` and ``load_state_dict(state)`` finds its place by itself.

    Parameters
    ----------
    validation_loader : iterable, optional
        What is validated on; it may have generators of its own.
    looks_ahead : bool
        Batches are fetched one ahead; see `Batches`.

    Attributes
    ----------
    ahead : dict or None
        The place before the batch that was fetched ahead and waits for its turn.
    in_pass : bool
        A pass has begun and is not over.
    ended : bool
        All of its batches are trained on and AFTER_EPOCH is being or was dispatched.
    in_batch : bool
        A batch is under way: its state is on the stack, and nothing can be saved.
    torn : bool
        The latest batch was left in its middle, by an error.
    stepped : bool
        Whether an optimizer stepped at the latest batch.
    steps_before : int
        Executed optimizer steps when the pass began.

    Examples
    --------
    >>> position = DataPosition()
    >>> with torch.random.fork_rng():
    ...     batches = position.begin(torch.utils.data.DataLoader(range(4), shuffle=True), 0)
    ...     first, state = next(batches), position.state_dict()
    ...     elsewhere = DataPosition()
    ...     elsewhere.load_state_dict(state)
    ...     list(elsewhere.resume(torch.utils.data.DataLoader(range(4), shuffle=True), 1)) == list(batches)
    True
    """

    def __init__(self, validation_loader: Iterable[Any] | None = None, *, looks_ahead: bool = False) -> None:
        self._validation_loader, self._looks_ahead = validation_loader, looks_ahead
        self.ahead: dict[str, Any] | None = None
        self.in_pass = self.ended = self.in_batch = self.torn = False
        self.stepped = True
        self.steps_before = 0
        self._running = False
        self._loader: Iterable[Any] | None = None
        self._left_loader: dict[str, Any] = {}
        self._start: dict[str, Any] | None = None
        self._pending: dict[str, Any] | None = None

    @property
    def resumes(self) -> bool:
        """Whether a pass that was left in the middle waits to be gone on with."""
        return self._pending is not None and self.in_pass

    def enter(self, loader: Iterable[Any]) -> None:
        """Note that BEFORE_TRAINING is over and `loader` is iterated next, from a loaded state if there is one."""
        self._loader, self._running = loader, True
        if self._pending is None:
            self.in_pass = self.ended = False  # the loader may be another one, so what was left is begun anew
            return
        _restore_loader(loader, (self.ahead or self._pending)["loader"], begins=not self.in_pass)
        if self._pending["running"]:
            restore_rng(self._pending["rng"])
        if not self.in_pass:
            self._pending = None

    def leave(self) -> None:
        """Note that the loader is not used any more."""
        if self._loader is not None:
            self._left_loader = _loader_now(self._loader)
        self._loader, self._running = None, False

    def begin(self, loader: Iterable[Any], steps: int) -> Batches:
        """Return the batches of a new pass, which begins after so many steps."""
        self._pending = self.ahead = None
        self._start = {"rng": capture_rng(), "loader": _loader_state(loader)}
        self.in_pass, self.ended, self.steps_before = True, False, steps
        return self._batches(iter(loader), loader)

    def resume(self, loader: Iterable[Any], done: int) -> Batches:
        """Return the batches of the loaded pass that follow those that were trained on.

        Raises
        ------
        CheckpointMismatchError
            A ``ValueError``: the loader has fewer batches than were trained on.
        """
        assert self._pending is not None
        assert self._start is not None
        finds_place = _OWN in self._pending["loader"]  # and was told so when the loader was entered
        if not finds_place:
            restore_rng(self._start["rng"])
            _restore_loader(loader, self._start["loader"], begins=True)
        source = iter(loader)
        if not finds_place:
            _pass_over(source, done, loader)
        batches = self._batches(source, loader)
        if self.ahead is not None:
            restore_rng(self.ahead["rng"])
            if not finds_place:
                _restore_loader(loader, self.ahead["loader"], begins=False)
            batches.fetch()
        self.resume_ended(loader)
        return batches

    def _batches(self, source: Iterator[Any], loader: Iterable[Any]) -> Batches:
        """Look ahead in streams of several ranks, too: where one ends before another, they learn it at that step."""
        ends_unseen = world_size() > 1 and length_of(loader) is None
        return Batches(source, self, looks_ahead=self._looks_ahead or ends_unseen)

    def resume_ended(self, loader: Iterable[Any]) -> None:
        """Go on from a loaded state in which all batches of the pass are trained on."""
        assert self._pending is not None
        if _OWN not in self._pending["loader"]:
            _restore_loader(loader, self._pending["loader"], begins=self.ended)
        restore_rng(self._pending["rng"])
        self._pending = None

    def place(self) -> dict[str, Any]:
        """Return random numbers and place in the data, as they are now; nothing is drawn."""
        return {
            "rng": capture_rng(),
            "loader": self._left_loader if self._loader is None else _loader_now(self._loader),
        }

    def all_trained(self) -> None:
        """Note that no batch is left, and AFTER_EPOCH follows."""
        self.ended, self.ahead = True, None

    def end(self) -> None:
        """Note that the pass is over, its AFTER_EPOCH included."""
        self.in_pass = self.ended = False
        self._start = self._pending = None

    def batch(self) -> AbstractContextManager[None]:
        """Note that a batch is under way; a loaded position that nobody resumed is left for good."""
        if self._pending is not None:
            self._pending, self.ahead, self.in_pass = None, None, False
        self.in_batch = self.torn = True
        return _UnderWay(self)

    def batch_is_over(self) -> None:
        """Note that a batch is counted, and AFTER_BATCH follows."""
        self.in_batch = self.torn = False

    def note_step(self, ctx: TrainContext) -> None:
        """Note whether an optimizer stepped at the latest batch, once it is known."""
        self.stepped = not ctx.step_skipped

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain data; no random number is drawn."""
        if self.torn:
            warnings.warn(_TORN, CheckpointWarning, stacklevel=4)
        now = self._pending or {**self.place(), "running": self._running}
        return {
            "in_pass": self.in_pass,
            "ended": self.ended,
            "stepped": self.stepped,
            "steps_before": self.steps_before,
            "start": self._start if self.in_pass else None,
            "ahead": self.ahead if self.in_pass else None,
            "validation": _loader_state(self._validation_loader),
            "now": now,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a position, and set the random numbers; the next `enter` goes on there."""
        _restore_loader(self._validation_loader, state["validation"], begins=True)
        self.in_pass, self.ended, self.in_batch, self.torn = state["in_pass"], state["ended"], False, False
        self.stepped, self.steps_before = state["stepped"], state["steps_before"]
        self._start, self._pending = state["start"], dict(state["now"])
        self.ahead = state.get("ahead")  # states of 0.1 have none
        self._left_loader = self._pending["loader"]
        restore_rng(self._pending["rng"])


class _UnderWay(AbstractContextManager[None]):
    """A batch that is under way until the context is left; a generator would take as long as ten calls."""

    def __init__(self, position: DataPosition) -> None:
        self._position = position

    def __enter__(self) -> None:
        """Do nothing: it is under way already."""

    def __exit__(self, *_: object) -> None:
        self._position.in_batch = False


def _pass_over(batches: Iterator[Any], done: int, loader: Any) -> None:
    missing = object()
    for passed in range(done):
        if next(batches, missing) is missing:
            raise CheckpointMismatchError(
                f"The loader ({type(loader).__name__}) gave {passed} batches, but the checkpoint was saved after "
                f"{done} of this pass; give the data as it was, or train a new strategy on the loaded models."
            )


def _parts(loader: Any) -> dict[str, Any]:
    """Return a loader and its samplers by name, each object once."""
    found: dict[str, Any] = {}
    for path in _PARTS:
        part = loader
        for name in filter(None, path.split(".")):
            part = getattr(part, name, None)
        if part is not None and all(part is not other for other in found.values()):
            found[path] = part
    return found


def _loader_now(loader: Any) -> dict[str, Any]:
    """Return where a loader is: what it says itself, if it can, else the states of its generators and samplers.

    A ``DataLoader`` that can, torchdata's ``StatefulDataLoader``, is passed over like any other: told its place between
    two passes, it would draw other random numbers.
    """
    own = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
    if not own or isinstance(loader, DataLoader):
        return _loader_state(loader)
    with random_numbers_kept():
        return {_OWN: host_copy(loader.state_dict())}


def _loader_state(loader: Any) -> dict[str, Any]:
    """Return the states of a loader's own generators, and the epochs that its samplers were told."""
    parts = _parts(loader)
    generators = {path: getattr(part, "generator", None) for path, part in parts.items()}
    return {
        "working": _is_working(loader),
        "generators": {path: g.get_state() for path, g in generators.items() if isinstance(g, torch.Generator)},
        "epochs": {
            path: part.epoch
            for path, part in parts.items()
            if callable(getattr(part, "set_epoch", None)) and type(getattr(part, "epoch", None)) is int
        },
    }


def _is_working(loader: Any) -> bool:
    """Return whether a loader has worker processes that stay from pass to pass."""
    return bool(getattr(loader, "persistent_workers", False)) and getattr(loader, "_iterator", None) is not None


def _restore_loader(loader: Any, state: Mapping[str, Any], *, begins: bool) -> None:
    """Bring a loader into a state that was saved; `begins` says that a pass begins with it."""
    if _OWN in state:
        if not callable(getattr(loader, "load_state_dict", None)):
            raise CheckpointMismatchError(
                f"The checkpoint holds the place that its loader kept, but this loader ({type(loader).__name__}) has "
                "no load_state_dict; make the loader as it was."
            )
        loader.load_state_dict(state[_OWN])
        return
    parts = _parts(loader)
    if begins and state.get("working") and not _is_working(loader):
        with random_numbers_kept():
            iter(loader)  # workers that are there already draw no seed when a pass begins; new ones do
    for path, saved in state.get("generators", {}).items():
        generator = getattr(parts.get(path), "generator", None)
        if not isinstance(generator, torch.Generator):
            where = f"loader.{path}.generator" if path else "loader.generator"
            raise CheckpointMismatchError(
                f"The checkpoint holds the state of {where}, but this loader ({type(loader).__name__}) has no such "
                "generator; make the loader as it was, or train a new strategy on the loaded models."
            )
        generator.set_state(saved)
    for path, epoch in state.get("epochs", {}).items():
        if callable(getattr(parts.get(path), "set_epoch", None)):
            parts[path].set_epoch(epoch)
