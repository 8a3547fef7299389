"""What goes wrong in clipping."""

from __future__ import annotations

import torch
from torch import nn

from .loop import Loop, parameters_of

__all__ = [
    "ClipsEachParameterByItself",
    "ClipsEveryMicroBatch",
    "ClipsScaledGradients",
    "KeepsAGenerator",
    "KnowsDenseGradientsOnly",
    "StacksWhateverNormsThereAre",
    "StepsOnANormThatIsNotFinite",
    "TakesAnyThreshold",
    "UnscalesEveryMicroBatch",
]


class ClipsScaledGradients(Loop):
    """Gradients are clipped right after the backward pass, with the loss scale still in them."""

    def attempt(self):
        self.clip()
        self.clipping = None
        return super().attempt()


class ClipsEveryMicroBatch(Loop):
    """Clipping follows each backward pass, so that sums of parts are clipped."""

    def backward(self, loss):
        loss.backward()
        self.clip()

    def attempt(self):
        self.held = 1.0  # a sum; a mean would have the same direction
        return super().attempt()


class UnscalesEveryMicroBatch(Loop):
    """To clip true gradients, each micro-batch unscales, although the window has been unscaled before."""

    def backward(self, loss):
        loss.backward()
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)


class StepsOnANormThatIsNotFinite(Loop):
    """The norm is inf, its coefficient 0: finite gradients become 0, an inf becomes nan, and the step is taken."""

    def attempt(self):
        self.clip()
        for optimizer in self.optimizers:
            optimizer.step()
        return True


class KeepsAGenerator(Loop):
    """The parameters to be clipped are kept as they came, as a generator that the first window uses up."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.parameters = model.parameters()

    def clip(self):
        nn.utils.clip_grad_norm_(self.parameters, self.clipping["max_norm"])


class KnowsDenseGradientsOnly(Loop):
    """The norm is taken as of a dense gradient; sparse layouts have none of that name."""

    def attempt(self):
        self.clip()
        return super().attempt()


class TakesAnyThreshold(Loop):
    """The threshold is passed on as it comes: 0 zeroes all gradients, -1 turns them round, nan destroys them."""


class StacksWhateverNormsThereAre(Loop):
    """The norm of the norms is taken, of gradients that may not be there, in the dtype of each."""

    def attempt(self):
        gradients = [p.grad for one in self.optimizers for p in parameters_of(one) if p.grad is not None]
        self.norm_before_clipping = float(torch.stack([gradient.norm() for gradient in gradients]).norm())
        return super().attempt()


class ClipsEachParameterByItself(Loop):
    """The limit is applied to each parameter, so the whole is above it and points elsewhere."""

    def clip(self):
        for optimizer in self.optimizers:
            for parameter in parameters_of(optimizer):
                nn.utils.clip_grad_norm_([parameter], self.clipping["max_norm"])
