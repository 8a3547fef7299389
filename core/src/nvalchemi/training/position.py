"""Where in the data a run is, so that another process can go on with the very next batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from nvalchemi.errors import CheckpointMismatchError
from nvalchemi.training.rng import capture_rng, restore_rng

if TYPE_CHECKING:
    from nvalchemi.hooks.context import TrainContext

__all__ = ["DataPosition"]

_PARTS = ("", "sampler", "batch_sampler", "batch_sampler.sampler")  # of a DataLoader, where it keeps generators


class DataPosition:
    """The pass over the loader that is under way, and the random numbers it began with.

    A pass is found again by beginning it with the same random numbers and passing over the batches that were trained
    on; after that the random numbers are those of the moment of saving.

    Attributes
    ----------
    in_pass : bool
        A pass has begun and is not over.
    ended : bool
        All of its batches are trained on and AFTER_EPOCH is being or was dispatched.
    in_batch : bool
        A batch is under way: its state is on the stack, and nothing can be saved.
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

    def __init__(self) -> None:
        self.in_pass = self.ended = self.in_batch = False
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
        _restore_loader(loader, self._pending["loader"])
        if self._pending["running"]:
            restore_rng(self._pending["rng"])
        if not self.in_pass:
            self._pending = None

    def leave(self) -> None:
        """Note that the loader is not used any more."""
        if self._loader is not None:
            self._left_loader = _loader_state(self._loader)
        self._loader, self._running = None, False

    def begin(self, loader: Iterable[Any], steps: int) -> Iterator[Any]:
        """Return the batches of a new pass, which begins after so many steps."""
        self._pending = None
        self._start = {"rng": capture_rng(), "loader": _loader_state(loader)}
        self.in_pass, self.ended, self.steps_before = True, False, steps
        return iter(loader)

    def resume(self, loader: Iterable[Any], done: int) -> Iterator[Any]:
        """Return the batches of the loaded pass that follow those that were trained on.

        Raises
        ------
        CheckpointMismatchError
            A ``ValueError``: the loader has fewer batches than were trained on.
        """
        assert self._pending is not None
        assert self._start is not None
        restore_rng(self._start["rng"])
        _restore_loader(loader, self._start["loader"])
        batches = iter(loader)
        for passed in range(done):
            if next(batches, self) is self:
                raise CheckpointMismatchError(
                    f"The loader ({type(loader).__name__}) gave {passed} batches, but the checkpoint was saved after "
                    f"{done} of this pass; give the data as it was, or train a new strategy on the loaded models."
                )
        self.resume_ended(loader)
        return batches

    def resume_ended(self, loader: Iterable[Any]) -> None:
        """Go on from a loaded state in which all batches of the pass are trained on."""
        assert self._pending is not None
        _restore_loader(loader, self._pending["loader"])
        restore_rng(self._pending["rng"])
        self._pending = None

    def end(self) -> None:
        """Note that the pass is over, its AFTER_EPOCH included."""
        self.in_pass = self.ended = False
        self._start = self._pending = None

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Note that a batch is under way; a loaded position that nobody resumed is left for good."""
        if self._pending is not None:
            self._pending, self.in_pass = None, False
        self.in_batch = True
        try:
            yield
        finally:
            self.in_batch = False

    def batch_is_over(self) -> None:
        """Note that a batch is counted, and AFTER_BATCH follows."""
        self.in_batch = False

    def note_step(self, ctx: TrainContext) -> None:
        """Note whether an optimizer stepped at the latest batch, once it is known."""
        self.stepped = not ctx.step_skipped

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain data; no random number is drawn."""
        now = self._pending or {
            "rng": capture_rng(),
            "loader": self._left_loader if self._loader is None else _loader_state(self._loader),
            "running": self._running,
        }
        return {
            "in_pass": self.in_pass,
            "ended": self.ended,
            "stepped": self.stepped,
            "steps_before": self.steps_before,
            "start": self._start if self.in_pass else None,
            "now": now,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a position, and set the random numbers; the next `enter` goes on there."""
        self.in_pass, self.ended, self.in_batch = state["in_pass"], state["ended"], False
        self.stepped, self.steps_before = state["stepped"], state["steps_before"]
        self._start, self._pending = state["start"], dict(state["now"])
        self._left_loader = self._pending["loader"]
        restore_rng(self._pending["rng"])


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


def _loader_state(loader: Any) -> dict[str, Any]:
    """Return the states of a loader's own generators, and the epochs that its samplers were told."""
    parts = _parts(loader)
    generators = {path: getattr(part, "generator", None) for path, part in parts.items()}
    return {
        "generators": {path: g.get_state() for path, g in generators.items() if isinstance(g, torch.Generator)},
        "epochs": {
            path: part.epoch
            for path, part in parts.items()
            if callable(getattr(part, "set_epoch", None)) and type(getattr(part, "epoch", None)) is int
        },
    }


def _restore_loader(loader: Any, state: Mapping[str, Any]) -> None:
    parts = _parts(loader)
    for path, saved in state.get("generators", {}).items():
        generator = getattr(parts.get(path), "generator", None)
        if not isinstance(generator, torch.Generator):
            where = f"loader.{path}.generator" if path else "loader.generator"
            raise CheckpointMismatchError(
                f"The checkpoint holds the state of {where}, but this loader ({type(loader).__name__}) has no such "
                "generator; make the loader as it was."
            )
        generator.set_state(saved)
    for path, epoch in state.get("epochs", {}).items():
        if callable(getattr(parts.get(path), "set_epoch", None)):
            parts[path].set_epoch(epoch)
