"""Whole steps of a tiny network, where everything is overhead: our hooks and others, against a loop written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from nvalchemi.hooks import TrainContext
from nvalchemi.training import OptimizerConfig, TrainingStage, TrainingStrategy
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator
from rows import peers
from rows.figures import Figure
from rows.pipelines import DECAY, MAX_NORM, four
from rows.targets import TARGETS
from rows.timing import Effort, Ratio, calls, compare
from rows.tiny import BATCH, adamw, loss_of, mlp

__all__ = ["loops"]

Step = Callable[[], object]


def loops(quick: bool) -> Iterator[Figure]:
    """Measure the rows of the tiny network."""
    effort = Effort(rounds=11, slice=0.01) if quick else Effort(rounds=41, slice=0.02)
    ours = {
        "compute only": calls(compute_only()),
        "four": calls(with_hooks(four())),
        "four lazy": calls(with_hooks(four(), lazy=True)),
        "strategy": calls(strategy()),
        "strategy lazy": calls(strategy(lazy=True)),
    }
    others = peers.loops(quick)
    present = {name: one for name, one in others.items() if one is not None}
    ratios = compare(calls(raw()), ours | present, effort)
    beside = {name: ratios[name].median if name in ratios else None for name in ("compute only", *others)}
    for key in list(ours)[1:]:
        yield _figure(key, ratios[key], beside if key in ("four", "strategy") else {})
    ignite = peers.ignite(raw(clip=False, average=False))
    contestants = {"empty": calls(with_hooks([]))} | ({"ignite": ignite} if ignite else {})
    ratios = compare(calls(raw(clip=False, average=False)), contestants, effort)
    yield _figure("empty", ratios["empty"], {"ignite": ratios["ignite"].median if ignite else None})


def _figure(key: str, ratio: Ratio, beside: dict[str, float | None]) -> Figure:
    return Figure(TARGETS[key], ratio.median, (ratio.low, ratio.high), beside)


def raw(*, clip: bool = True, average: bool = True) -> Step:
    """Return the step that somebody in a hurry writes: no loss scale, no look for inf, no veto."""
    model, (x, y) = mlp(), BATCH
    optimizer, parameters = adamw(model), list(model.parameters())
    averages = [parameter.detach().clone() for parameter in parameters]

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        if clip:
            nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        if average:
            with torch.no_grad():
                torch._foreach_lerp_(averages, parameters, 1 - DECAY)

    return step


def compute_only() -> Step:
    """Return forward and backward, and gradients set to None."""
    model, (x, y) = mlp(), BATCH
    parameters = list(model.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        loss_of(model(x), y).backward()

    return step


def with_hooks(hooks: list[TrainingUpdateHook], *, lazy: bool = False) -> Step:
    """Return a step around an orchestrator, as in a loop of a user's own."""
    model, (x, y) = mlp(), BATCH
    optimizers, models = [adamw(model)], {"main": model}
    update = TrainingUpdateOrchestrator(*hooks, lazy=lazy)
    with TrainContext(models=models) as ctx:
        update(ctx, TrainingStage.SETUP)
    steps = 0

    def step() -> None:
        nonlocal steps
        with TrainContext(models=models, optimizers=optimizers, step_count=steps) as ctx:
            update(ctx, TrainingStage.BEFORE_BATCH)
            ctx.loss = loss_of(model(x), y)
            update(ctx, TrainingStage.DO_BACKWARD)
            update(ctx, TrainingStage.DO_OPTIMIZER_STEP)
            update(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
        steps += 1

    return step


def strategy(*, lazy: bool = False) -> Step:
    """Return a batch of a strategy."""
    run = TrainingStrategy(
        models=mlp(),
        optimizer_configs=OptimizerConfig(optimizer_cls="AdamW", optimizer_kwargs={"fused": True}),
        training_fn=lambda model, batch: model(batch[0]),
        loss_fn=_loss_of_batch,
        hooks=four(),
        num_steps=10**9,
        progress=False,
        lazy=lazy,
    )
    return lambda: run.train_batch(BATCH)


def _loss_of_batch(predictions: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return loss_of(predictions, batch[1])
