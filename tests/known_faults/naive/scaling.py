"""What goes wrong in loss scaling and mixed precision."""

from __future__ import annotations

import torch

from .loop import Loop

__all__ = [
    "BacksOffForEver",
    "FindsHalfParametersAtTheFirstStep",
    "LosesTheGrowthCount",
    "RestoresAnEmptyScaler",
    "ScalesWhereverThereIsAutocast",
]


class LosesTheGrowthCount(Loop):
    """A checkpoint keeps the scale and forgets how many good windows led to the next growth."""

    def go_on(self, state):
        super().go_on(state)
        settings = {name: state["scaler"][name] for name in ("growth_factor", "backoff_factor", "growth_interval")}
        self.scaler = torch.amp.GradScaler("cpu", init_scale=state["scaler"]["scale"], **settings)


class BacksOffForEver(Loop):
    """Nan after nan halves the scale until it is 0, where it stays."""


class ScalesWhereverThereIsAutocast(Loop):
    """Mixed precision means a scaler, in bf16 too."""

    def __init__(self, model, *, precision=None, **options):
        super().__init__(model, precision=precision, scale={}, **options)


class FindsHalfParametersAtTheFirstStep(Loop):
    """Parameters in fp16 are noticed where they are unscaled, after the first forward and backward."""


class RestoresAnEmptyScaler(Loop):
    """The state of a scaler is handed to the scaler there is, though the run that saved it had none."""

    def go_on(self, state):
        self.scaler.load_state_dict(state["scaler"])
        super().go_on(state)
