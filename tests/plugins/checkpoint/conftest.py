"""What the tests of saving share: runs, a veto, a look into the folder, and a writer that can be held up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from nvalchemi.training import OptimizerConfig, TrainingStrategy, Validation, take_snapshot
from nvalchemi.training.hooks import TrainingUpdateHook
from nvalchemi_hooks_checkpoint import folder

BATCHES = [torch.full((2, 1), float(i)) for i in range(1, 5)]


class Veto(TrainingUpdateHook):
    """Vetoes the batches of these numbers, counted from 0."""

    def __init__(self, *batches: int) -> None:
        self.batches = batches

    def before_optimizer_step(self, ctx, *, will_skip):
        return ctx.batch_count not in self.batches


class Accumulate(TrainingUpdateHook):
    """Steps at every n-th batch."""

    priority = 10

    def __init__(self, every: int) -> None:
        self.every = every

    def before_batch(self, ctx, *, will_skip):
        ctx.window_complete = (ctx.batch_count + 1) % self.every == 0
        return ctx.batch_count % self.every == 0


@pytest.fixture
def veto() -> type[Veto]:
    """A hook that vetoes given batches."""
    return Veto


@pytest.fixture
def accumulate() -> type[Accumulate]:
    """A hook that steps at every n-th batch."""
    return Accumulate


@pytest.fixture
def root(tmp_path) -> Path:
    """A folder for checkpoints that is not there yet."""
    return tmp_path / "runs" / "one"


@pytest.fixture
def strategy() -> Callable[..., TrainingStrategy]:
    """Makes a strategy whose validation gives the values it is told, one after the other."""

    def make(*hooks, losses=None, **settings) -> TrainingStrategy:
        torch.manual_seed(0)
        given = iter(losses or ())

        def loss_fn(predictions, batch):
            if isinstance(batch, str):
                return {"loss": torch.tensor(value := next(given)), "negated": torch.tensor(-value)}
            return predictions.square().mean()

        if losses is not None:
            every = settings.pop("validate_every_steps", None)
            settings["validation"] = Validation(loader=["held out"], every_steps=every, weights="live")
        settings.setdefault("models", nn.Linear(1, 1))
        return TrainingStrategy(
            optimizer_configs=OptimizerConfig(optimizer_cls=torch.optim.Adam, optimizer_kwargs={"lr": 0.1}),
            training_fn=lambda model, batch: None if isinstance(batch, str) else model(batch),
            loss_fn=loss_fn,
            **{"hooks": hooks, **settings},
        )

    return make


@pytest.fixture
def run(strategy) -> Callable[..., TrainingStrategy]:
    """Trains a strategy of these hooks on four batches an epoch, and returns it."""

    def train(*hooks, **settings) -> TrainingStrategy:
        made = strategy(*hooks, **settings)
        made.run(BATCHES)
        return made

    return train


@pytest.fixture
def steps() -> Callable[[Path], list[int]]:
    """Lists the steps of the complete checkpoints in a folder."""

    def listed(root: Path) -> list[int]:
        return sorted(int(path.parent.name.removeprefix("step-")) for path in root.glob("step-*/manifest.json"))

    return listed


class Gate:
    """Stands before every write: counts them, holds them up, and makes them fail."""

    def __init__(self) -> None:
        self.opened, self.arrived = threading.Event(), threading.Event()
        self.opened.set()
        self.copies: list[int] = []  # step of each copy that was taken
        self.written: list[str] = []
        self.alive = self.most_alive = 0
        self.threads: set[int] = set()
        self.failures: list[Exception | None] = []  # of the writes to come

    def open_soon(self) -> None:
        """Hold up the next write, and let it go after a while."""
        self.opened.clear()
        threading.Timer(0.3, self.opened.set).start()

    def take_snapshot(self, run):
        self.copies.append(run.step_count)
        self.alive += 1
        self.most_alive = max(self.alive, self.most_alive)
        return _Gated(self, take_snapshot(run))


class _Gated:
    def __init__(self, gate: Gate, snapshot) -> None:
        self.gate, self.snapshot = gate, snapshot

    def write(self, root: Path) -> None:
        gate = self.gate
        gate.threads.add(threading.get_ident())
        gate.arrived.set()
        assert gate.opened.wait(60)
        if failure := gate.failures.pop(0) if gate.failures else None:
            Path(root).mkdir(exist_ok=True)
            (Path(root) / "half").touch()
            raise failure
        self.snapshot.write(root)
        gate.written.append(Path(root).name)

    def __del__(self) -> None:
        self.gate.alive -= 1


@pytest.fixture
def gate(monkeypatch) -> Gate:
    """What every write has to pass."""
    gate = Gate()
    monkeypatch.setattr(folder, "take_snapshot", gate.take_snapshot)
    return gate
