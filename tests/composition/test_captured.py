"""A captured update comes to the same as the lazy loop, on a stand-in for a CUDA graph that runs Python only once.

What torch itself does in a capture on a GPU is not tested here: see tests/benchmarks/gpu.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nvalchemi.training.hooks.gradients as gradients
from nvalchemi.errors import HookContractError
from nvalchemi.hooks import TrainContext
from nvalchemi.testing import RecordedGraph
from nvalchemi.testing.compare import first_difference
from nvalchemi.training import (
    EMAHook,
    GradientClipHook,
    GradScalerVetoHook,
    LossScalingHook,
    MixedPrecisionHook,
    TrainingStage,
)
from nvalchemi.training.hooks import CapturedUpdate, TrainingUpdateHook, TrainingUpdateOrchestrator

STEPS = 100


@pytest.fixture(autouse=True)
def norms_as_on_a_device(monkeypatch):
    """A norm is measured once, in float64: on a CPU the code looks at it and may measure again, which no graph can."""
    once = lambda tensors, kind, device: gradients._norm_in(tensors, kind, device, exact=True)  # noqa: E731
    monkeypatch.setattr(gradients, "_norm", once)


STAGES = (TrainingStage.DO_BACKWARD, TrainingStage.DO_OPTIMIZER_STEP, TrainingStage.AFTER_OPTIMIZER_STEP)
OPTIMIZERS = {
    # Learning rates that float32 holds exactly, and that stay so: in a captured update they are float32 tensors.
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=2.0**-7, fused=True),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=2.0**-7, amsgrad=True, fused=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=2.0**-6, momentum=0.9, nesterov=True, fused=True),
}


def four(**ema: Any) -> list[TrainingUpdateHook]:
    """Return all four plugins, with a loss scale that grows often and averages that follow every third step."""
    return [
        LossScalingHook(init_scale=64.0, growth_interval=5, max_scale=1024.0),
        GradScalerVetoHook(max_consecutive_skips=None),
        GradientClipHook(max_norm=0.5),
        EMAHook(**{"decay": 0.875, "update_every": 3, **ema}),
    ]


class Run:
    """Training with two optimizers, each with a scheduler of its own, as a loop or captured."""

    def __init__(self, hooks: list[TrainingUpdateHook], *, optimizer: str = "AdamW", captured: bool, **options: Any):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 1))
        halves = list(self.model[0].parameters()), [*self.model[2].parameters(), *self.model[3].parameters()]
        self.optimizers = [OPTIMIZERS[optimizer](half) for half in halves]
        schedule = torch.optim.lr_scheduler.StepLR
        self.schedulers = [
            schedule(one, every, gamma=0.5) for one, every in zip(self.optimizers, (20, 30), strict=True)
        ]
        self.hooks = hooks
        self.update = TrainingUpdateOrchestrator(*hooks, lazy=True)
        self.update(TrainContext(models={"main": self.model}), TrainingStage.SETUP)
        self.captured = CapturedUpdate(self.update, self.loss, graph=RecordedGraph, **options) if captured else None
        self.generator = torch.Generator().manual_seed(1)
        self.contexts: list[TrainContext] = []
        self.seen: list[Any] = []
        self.steps = self.calls = 0
        self.make_context = TrainContext

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        return (self.model(batch["x"]) * batch["factor"]).square().mean()

    def batch(self, number: int, rows: int = 6) -> dict[str, Tensor]:
        x = torch.randn(rows, 4, generator=self.generator)
        return {"x": x, "factor": torch.tensor(torch.inf if number % 7 == 4 else 1.0 + number % 3)}

    def step(self, number: int, batch: Any = None) -> None:
        batch = self.batch(number) if batch is None else batch
        with self.make_context(
            models={"main": self.model},
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            step_count=self.steps,
            batch_count=number,
        ) as ctx:
            if self.captured is not None:
                self.captured(ctx, batch)
            else:
                self.update(ctx, TrainingStage.BEFORE_BATCH)
                ctx.loss = self.loss(batch)
                for stage in STAGES:
                    self.update(ctx, stage)
        if number % 2:  # else only the next batch asks
            self.seen.append((ctx.grad_norm.item(), ctx.loss.item(), {k: g.clone() for k, g in ctx.gradients.items()}))
        self.contexts.append(ctx)
        self.steps += not ctx.step_skipped

    def go(self, steps: int, batch: Callable[[int], Any] | None = None) -> None:
        for number in range(steps):
            self.step(number, None if batch is None else batch(number))

    def state(self) -> dict[str, Any]:
        return {
            "weights": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "hooks": self.update.state_dict(),
            "norms": [hook.last_norm for hook in self.hooks if isinstance(hook, GradientClipHook)],
            "seen": self.seen,
            "outcomes": [
                (ctx.step_skipped, ctx.outcome.found_inf, ctx.outcome.vetoes, ctx.outcome.optimizers)
                for ctx in self.contexts
            ],
        }


def pair(make=four, **options: Any) -> tuple[Run, Run]:
    """Return a loop and a captured run of the same."""
    optimizer = options.pop("optimizer", "AdamW")
    return Run(make(), optimizer=optimizer, captured=False), Run(make(), optimizer=optimizer, captured=True, **options)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_100_batches_come_to_the_same_bits(optimizer):
    """Weights, moments, averages, scale, counters, learning rates, norms and outcomes are those of the lazy loop."""
    loop, captured = pair(optimizer=optimizer)
    for number in range(STEPS):
        loop.step(number)
        captured.step(number)
        assert not first_difference(captured.state(), loop.state())
    assert captured.captured.replays > 85
    assert captured.captured.captures == 2  # steps that count for the average, and those that do not
    assert captured.calls < 15  # Python ran in the first batches, and in the two captures
    assert sum(ctx.step_skipped for ctx in captured.contexts) == 14
    assert len({group["lr"] for one in captured.optimizers for group in one.param_groups}) == 2
    assert all(type(group["lr"]) is float for one in captured.optimizers for group in one.param_groups)
    scale = captured.hooks[0].scaler.get_scale()
    assert scale != 64.0


def stacks() -> dict[str, Any]:
    """Return compositions, each as a function that makes its hooks."""
    return {
        "nothing": list,
        "an average": lambda: [EMAHook(decay=0.875)],
        "a check": lambda: [GradScalerVetoHook()],
        "each clipped, and cut": lambda: [GradientClipHook(max_norm=0.5, per_optimizer=True, clip_value=0.1)],
        "measured": lambda: [GradientClipHook(max_norm=float("inf"), norm_type=1.0), EMAHook(decay=0.25)],
        "a fixed scale": lambda: [LossScalingHook(scale=128.0), GradScalerVetoHook()],
        "bf16": lambda: [MixedPrecisionHook("bf16"), GradScalerVetoHook()],
        "averages begin later": lambda: four(start_step=12, update_every=1),
    }


@pytest.mark.parametrize("name", stacks())
def test_every_composition_comes_to_the_same_bits(name):
    """Whatever hooks there are, alone or together, thirty batches are those of the lazy loop."""
    make = stacks()[name]
    loop, captured = pair(make)
    finite = not any(isinstance(hook, GradScalerVetoHook | GradientClipHook) for hook in make())
    for number in range(30):
        batch = loop.batch(number)
        if finite:  # nobody would hold the step back
            batch["factor"].fill_(1.0)
        loop.step(number, batch)
        captured.step(number, batch)
    assert not first_difference(captured.state(), loop.state())
    assert captured.captured.replays > 5


def test_batches_of_several_shapes_have_a_graph_each():
    """The second shape is captured for itself, and going from one to the other and back changes no bit."""
    loop, captured = pair(lambda: four(update_every=1))
    for number in range(30):
        rows = 6 if number % 3 else 9
        loop.step(number, loop.batch(number, rows))
        captured.step(number, captured.batch(number, rows))
    assert not first_difference(captured.state(), loop.state())
    assert captured.captured.captures == 2


def test_weights_and_state_that_have_moved_are_captured_anew():
    """A restored state lies elsewhere: the graphs are dropped, and training goes on as the loop does."""
    loop, captured = pair(lambda: four(update_every=1))
    for number in range(30):
        if number == 12:
            for run in (loop, captured):
                run.update.resolve()
                for optimizer in run.optimizers:
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                run.update.load_state_dict(run.update.state_dict())
        loop.step(number)
        captured.step(number)
    assert not first_difference(captured.state(), loop.state())
    assert captured.captured.captures == 1
    assert captured.captured.replays < 24


def test_a_threshold_that_is_changed_counts():
    """max_norm is a Python number in a graph, so another one is captured for itself."""
    loop, captured = pair(lambda: four(update_every=1))
    for number in range(30):
        for run in (loop, captured):
            run.hooks[2].max_norm = 0.5 if number < 15 else 0.01
            run.step(number)
    assert not first_difference(captured.state(), loop.state())
    assert captured.captured.captures == 2


def test_random_numbers_are_those_of_the_loop():
    """Dropout draws in a capture, which does nothing, and again in the replay: the loop's masks come out."""
    loop, captured = pair(lambda: [GradScalerVetoHook(max_consecutive_skips=None)])
    for run in (loop, captured):
        run.model.insert(2, nn.Dropout(0.5))
        torch.manual_seed(7)
        run.go(12)
    assert captured.captured.replays
    assert not first_difference(captured.state(), loop.state())


@pytest.mark.parametrize("change", [lambda m: m[0].bias.requires_grad_(False), lambda m: m[2].eval()])
def test_what_is_frozen_in_a_run_counts(change):
    """A weight that needs no gradient any more, or a part in eval mode, is captured for itself."""
    loop, captured = pair(lambda: four(update_every=1))
    for number in range(30):
        for run in (loop, captured):
            if number == 15:
                change(run.model)
            run.step(number)
    assert not first_difference(captured.state(), loop.state())
    assert captured.captured.captures == 2


def test_the_limit_of_skips_stops_a_captured_run_by_name():
    """After too many skips in a row the error names the parameter, as in the loop."""
    messages = []
    for run in pair(lambda: [GradScalerVetoHook(max_consecutive_skips=3)]):

        def batch(number, run=run):
            return {**run.batch(0), "factor": torch.tensor(torch.inf if number > 20 else 1.0)}

        with pytest.raises(FloatingPointError) as caught:
            run.go(40, batch)
        messages.append((len(run.contexts), str(caught.value)))
    assert messages[0] == messages[1]
    assert "'0.weight'" in messages[0][1]


def test_a_hook_that_does_not_say_how_it_is_replayed_is_refused():
    """The class and what it overrides are named, before anything is captured."""

    class Looks(TrainingUpdateHook):
        def after_optimizer_step(self, ctx, *, skipped):
            pass

    with pytest.raises(HookContractError, match="Looks overrides after_optimizer_step"):
        CapturedUpdate(TrainingUpdateOrchestrator(Looks(), lazy=True), lambda batch: batch)


def test_a_hook_without_work_in_a_batch_needs_to_say_nothing():
    """A hook that only counts what is settled is called after every replay."""

    class Counts(TrainingUpdateHook):
        reads_grad = False
        steps = 0

        def settled(self, ctx, *, skipped):
            self.steps += not skipped

    run = Run([*four(), Counts()], captured=True)
    for number in range(20):
        run.step(number)
    assert run.hooks[-1].steps == run.steps


def test_an_eager_orchestrator_is_refused():
    """Without lazy=True the host decides on every step, and the message says what to do."""
    with pytest.raises(ValueError, match="lazy=True"):
        CapturedUpdate(TrainingUpdateOrchestrator(), lambda batch: batch)


def test_an_optimizer_that_is_not_fused_is_refused():
    """The message names the optimizer and what to do."""
    run = Run([GradScalerVetoHook()], captured=True)
    run.optimizers = [torch.optim.AdamW(run.model.parameters(), lr=0.01, foreach=True)]
    run.schedulers = []
    with pytest.raises(RuntimeError, match="AdamW cannot be captured: the optimizer is not fused"):
        run.step(0)


def test_torchs_own_scaler_is_refused():
    """A scaler that unscales by itself asks the host, and is told apart."""
    run = Run([GradScalerVetoHook()], captured=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    run.captured = CapturedUpdate(run.update, lambda batch: scaler.scale(run.loss(batch)), graph=RecordedGraph)
    run.make_context = lambda **fields: TrainContext(**fields, grad_scaler=scaler)
    with pytest.raises(RuntimeError, match="the scaler unscales by itself"):
        run.go(8)


def test_raising_on_a_norm_is_refused():
    """error_if_nonfinite asks the host in every step, so the hook refuses by name."""
    run = Run([GradientClipHook(error_if_nonfinite=True)], captured=True)
    with pytest.raises(RuntimeError, match="error_if_nonfinite"):
        run.step(0)


def test_too_many_kinds_are_refused():
    """The message says what keeps changing."""
    run = Run([GradScalerVetoHook(max_consecutive_skips=None)], captured=True, warmup=1, most=2)
    with pytest.raises(RuntimeError, match="captured 2 times.*the shape of the batch"):
        run.go(20, lambda number: run.batch(number, rows=3 + number // 4))


def test_an_open_window_is_refused():
    """Accumulation over several batches is no whole update."""
    run = Run([GradScalerVetoHook()], captured=True)
    with (
        TrainContext(model=run.model, optimizers=run.optimizers, window_complete=False) as ctx,
        pytest.raises(RuntimeError, match="several batches"),
    ):
        run.captured(ctx, run.batch(0))


def test_a_loss_that_reads_from_the_device_is_refused_while_it_is_captured():
    """The error says that it was raised in a capture."""
    run = Run([GradScalerVetoHook()], captured=True, warmup=1)
    run.captured._loss = lambda batch: run.loss(batch) * (1.0 if batch["x"].sum().item() else 2.0)
    with pytest.raises(RuntimeError, match="_local_scalar_dense") as caught:
        run.go(8)
    assert "while an update was captured" in caught.value.__notes__[0]


def test_an_odd_batch_is_refused():
    """What is neither tensor nor constant could not be copied, and is named."""
    run = Run([GradScalerVetoHook()], captured=True)
    with pytest.raises(TypeError, match="given a set in a batch"):
        run.step(0, {"x": {1, 2}})


def test_the_window_of_a_replay_is_taken_from_its_context():
    """Its memory belongs to the next replay, so a context that somebody kept says nothing instead of another's."""
    run = Run(four(), captured=True)
    for number in range(20):
        run.step(number)
    with pytest.raises(RuntimeError, match="no update to ask about"):
        _ = run.contexts[-2].grad_norm
    assert run.contexts[-1].grad_norm.item() > 0
