"""Hooks that do what a batch tells them, and note what they see."""

from __future__ import annotations

from typing import Any

import torch

from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook

from .settings import Settings, Step


class Boom(Exception):
    """What a batch asked to be raised."""


class Batch:
    """A step with its tensors, as a loader gives it."""

    def __init__(self, step: Step, dtype: torch.dtype) -> None:
        self.step = step
        self.w = torch.tensor(step.w, dtype=dtype)
        self.b = None if step.b is None else torch.tensor(step.b, dtype=dtype)

    def to(self, device: torch.device) -> Batch:
        """Stay where it is."""
        return self


class Facts:
    """What was seen in one batch."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.autocast: bool | None = None  # in the forward
        self.gradients: dict[str, list[float] | None] | None = None  # by a hook that reads them
        self.loss: float | None = None
        self.looked: dict[str, Any] = {}


class Probe(TrainingUpdateHook):
    """Vetoes, defers, raises and keeps windows open when it is told; reads gradients if it is made so."""

    name = "probe"

    def __init__(self, settings: Settings, facts: list[Facts]) -> None:
        self.reads_grad, self.defers_veto = settings.probe_reads, settings.probe_defers
        self._lazy, self._facts = settings.lazy, facts

    def before_batch(self, ctx, *, will_skip):
        """Keep the window open, if the batch says so."""
        self._facts.append(Facts(ctx.batch.step))
        self._fail(ctx, "before_batch")
        if ctx.batch.step.open:
            ctx.window_complete = False
        return True

    def transform_loss(self, ctx, loss):
        """Change nothing."""
        self._fail(ctx, "transform_loss")
        return loss

    def before_optimizer_step(self, ctx, *, will_skip):
        """Look at gradients, and veto."""
        self._fail(ctx, "before_optimizer_step")
        if self.reads_grad:
            grads = {name: p.grad for name, p in ctx.models["main"].named_parameters()}
            self._facts[-1].gradients = {n: None if g is None else g.reshape(-1).tolist() for n, g in grads.items()}
        veto = ctx.batch.step.veto
        if veto.startswith("deferred") and self.defers_veto:
            ctx.defer_veto(torch.tensor(float(veto != "deferred no")), "asked", found_inf=veto == "deferred inf")
            return True
        return veto in ("", "deferred no")

    def after_optimizer_step(self, ctx, *, skipped):
        """Change nothing."""
        self._fail(ctx, "after_optimizer_step")

    def settled(self, ctx, *, skipped):
        """Change nothing; raising here while a lazy step is looked at would hit whoever looks."""
        if not self._lazy:
            self._fail(ctx, "settled")

    def _fail(self, ctx, method: str) -> None:
        if ctx.batch.step.fault == ("update", method):
            raise Boom(method)


class Onlooker:
    """A plain hook at every stage: raises and saves when it is told, and reads what a logger would."""

    frequency = 1
    stage = None

    def __init__(self, run: Any) -> None:
        self._run = run

    def _runs_on_stage(self, stage):
        return stage not in (TrainingStage.SETUP, TrainingStage.DO_BACKWARD, TrainingStage.DO_OPTIMIZER_STEP)

    def __call__(self, ctx, stage):
        """Do what the batch says."""
        if ctx.batch is None:
            if stage in self._run.save_at:
                self._run.keep()
            return
        step = ctx.batch.step
        if step.fault == ("plain", stage):
            raise Boom(stage.name)
        if stage is TrainingStage.AFTER_BATCH:
            facts = self._run.facts[-1]
            assert not ctx.loss.requires_grad
            facts.loss = float(ctx.loss)
            if step.looks:
                facts.looked = {"skipped": ctx.step_skipped, "step_count": ctx.step_count}
            if step.save is stage:
                self._run.keep()
