"""What it costs to call hooks that do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pluggy

from nvalchemi.hooks import HookRegistry
from nvalchemi.training import TrainingStage
from rows.figures import Figure
from rows.targets import TARGETS
from rows.timing import Effort, calls, seconds_each

__all__ = ["dispatch"]

STAGES = [stage for stage in TrainingStage if not stage.name.startswith("DO_")][3:9]
HOOKS = 4
CONTEXT = object()


class Idle:
    """A hook that does nothing."""

    frequency = 1

    def __init__(self, stage: TrainingStage) -> None:
        self.stage = stage

    def __call__(self, ctx: Any, stage: Any) -> None:
        """Do nothing."""


def dispatch(quick: bool) -> Iterator[Figure]:
    """Measure six stages of four hooks."""
    effort = Effort(rounds=11 if quick else 41, slice=0.01, warm_up=100)
    loops, by_pluggy = (seconds_each(calls(one), effort) for one in (_plain_loops(), _pluggy()))
    ours = seconds_each(calls(_registry()), effort)
    peers = {"plain loops": loops.median * 1e6, "pluggy": by_pluggy.median * 1e6}
    yield Figure(TARGETS["dispatch"], ours.median * 1e6, (ours.low * 1e6, ours.high * 1e6), peers)


def _registry() -> Any:
    registry = HookRegistry(TrainingStage)
    for stage in STAGES:
        for _ in range(HOOKS):
            registry.register(Idle(stage))
    call = registry.dispatch

    def step() -> None:
        for stage in STAGES:
            call(CONTEXT, stage)

    return step


def _plain_loops() -> Any:
    hooks = {stage: [Idle(stage) for _ in range(HOOKS)] for stage in STAGES}

    def step() -> None:
        for stage in STAGES:
            for hook in hooks[stage]:
                hook(CONTEXT, stage)

    return step


def _pluggy() -> Any:
    spec, impl = pluggy.HookspecMarker("idle"), pluggy.HookimplMarker("idle")
    names = [stage.name.lower() for stage in STAGES]

    def method(ctx: Any) -> None:
        """Do nothing."""

    manager = pluggy.PluginManager("idle")
    manager.add_hookspecs(type("Specs", (), {name: staticmethod(spec(_copy(method))) for name in names}))
    for _ in range(HOOKS):
        manager.register(type("Plugin", (), {name: staticmethod(impl(_copy(method))) for name in names})())
    every = [getattr(manager.hook, name) for name in names]

    def step() -> None:
        for one in every:
            one(ctx=CONTEXT)

    return step


def _copy(function: Any) -> Any:
    return type(function)(function.__code__, function.__globals__)
