"""What goes wrong in averages of weights."""

from __future__ import annotations

import copy

import torch

from .loop import Average, Loop

__all__ = [
    "AveragesEveryMicroBatch",
    "AveragesIntegers",
    "AveragesInHalfPrecision",
    "AveragesParametersOnly",
    "AveragesTensorByTensor",
    "CopiesAtTheFirstUpdate",
    "ExpectsTheModelAsItWas",
    "MatchesNames",
    "NeverCallsTheUpdate",
    "RebuildsTheAverageOnResume",
    "SavesOneCopy",
    "SwapsWeightsIn",
]


class RebuildsTheAverageOnResume(Loop):
    """A fresh average is built after the state was loaded, with a counter that begins at 0."""

    def go_on(self, state):
        super().go_on(state)
        self.shadow_of = Average(self.live, self.shadow_of.decay)


class SwapsWeightsIn(Loop):
    """Evaluation copies the average into the model, and whoever saves in the meantime saves it as the live weights."""

    def evaluate(self, batches):
        live = copy.deepcopy(self.live.state_dict())
        self.live.load_state_dict(self.shadow.state_dict())
        results = [float(self.loss(self.live(batch), batch)) for batch in batches]
        self.live.load_state_dict(live)
        return sum(results) / len(results)


class SavesOneCopy(Loop):
    """The checkpoint holds the averaged weights alone, and both copies begin from them."""

    def state(self):
        return super().state() | {"live": self.shadow.state_dict()}


class _ParametersOnly(Average):
    def tensors(self, model):
        return dict(model.named_parameters())


class AveragesParametersOnly(Loop):
    """The average visits parameters, and its buffers stay as they were when it was built."""

    average = _ParametersOnly


class _Integers(Average):
    @torch.no_grad()
    def update(self, model):
        live = self.tensors(model)
        for name, average in self.tensors(self.module).items():
            new = average * self.decay + live[name] * (1 - self.decay) if self.updates else live[name]
            average.copy_(new)
        self.updates += 1


class AveragesIntegers(Loop):
    """The formula is applied to every buffer, and a count of batches is cut back to a whole number each time."""

    average = _Integers


class _HalfPrecision(Average):
    @torch.no_grad()
    def update(self, model):
        for average, live in zip(self.module.parameters(), model.parameters(), strict=True):
            average.lerp_(live, 1 - self.decay if self.updates else 1.0)
        self.updates += 1


class AveragesInHalfPrecision(Loop):
    """The average has the dtype of the weights, in which a thousandth of the difference is rounded away."""

    average = _HalfPrecision


class CopiesAtTheFirstUpdate(Loop):
    """The model is copied where the first average is taken, when it holds tensors that refuse to be copied."""

    def __init__(self, model, *, ema, **options):
        super().__init__(model, **options)
        self.settings = ema

    def stepped(self):
        super().stepped()
        self.shadow_of = Average(self.live, **self.settings)


class _ByName(Average):
    def tensors(self, model):
        names = dict(self.module.named_parameters()) if model is not self.module else None
        return {n: t for n, t in model.named_parameters() if names is None or n in names}

    @torch.no_grad()
    def update(self, model):
        live = self.tensors(model)
        for name, average in self.tensors(self.module).items():
            if name in live:
                average.lerp_(live[name], 1 - self.decay if self.updates else 1.0)
        self.updates += 1


class MatchesNames(Loop):
    """Weights are looked up by name, and where a compiled model has other names nothing is found, and nothing said."""

    average = _ByName


class ExpectsTheModelAsItWas(Loop):
    """The average was built before the model was wrapped, and asks for names that the wrapped one has not."""


class AveragesEveryMicroBatch(Loop):
    """The average follows each batch of a window, most of which changed nothing."""

    def stepped(self):
        self.steps += 1

    def after_batch(self):
        self.shadow_of.update(self.live)


class NeverCallsTheUpdate(Loop):
    """The call of the update got lost, and nobody notices: the average is the model as it was."""

    def stepped(self):
        self.steps += 1


class _TensorByTensor(Average):
    @torch.no_grad()
    def update(self, model):
        for average, live in zip(self.module.parameters(), model.parameters(), strict=True):
            average.mul_(self.decay).add_(live, alpha=1 - self.decay)
        self.updates += 1


class AveragesTensorByTensor(Loop):
    """Every tensor is averaged by operations of its own, and every scale is read by the host."""

    average = _TensorByTensor
