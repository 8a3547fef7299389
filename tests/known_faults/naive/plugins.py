"""What goes wrong in hooks: their order, their state, and what they leave behind."""

from __future__ import annotations

import pickle

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from .loop import Loop

__all__ = [
    "EntersAutocastByHand",
    "HoldsAFunctionOfAFunction",
    "KeepsLosses",
    "KeepsTheOrderOfRegistration",
    "SavesBeforeTheAverage",
    "SavesWhateverHooksHold",
]


class HoldsAFunctionOfAFunction(Loop):
    """The averaging function is made inside another function, where a pickle does not find it again."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def pickled(self):
        return pickle.dumps(self.averaged)


class SavesWhateverHooksHold(Loop):
    """The state of every hook is written as it comes, which is found out when it is read."""

    def __init__(self, model, *, hooks=(), **options):
        super().__init__(model, **options)
        self.hooks = hooks

    def state(self):
        return super().state() | {"hooks": [hook.state_dict() for hook in self.hooks]}


class EntersAutocastByHand(Loop):
    """Autocast is entered before the forward pass and left after the backward pass, if nothing raises between."""

    def step(self, batch, rest=()):
        autocast = torch.autocast("cpu", self.autocast)
        autocast.__enter__()
        self.optimizers[0].zero_grad()
        self.loss(self.live(batch), batch).backward()
        autocast.__exit__(None, None, None)
        self.optimizers[0].step()


class KeepsLosses(Loop):
    """The loss of each batch is kept for a mean, with its graph."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.losses = []

    def backward(self, loss):
        loss.backward(retain_graph=True)
        self.losses.append(loss)


class KeepsTheOrderOfRegistration(Loop):
    """Hooks are called as they were registered, and no hook can say where it belongs."""

    @staticmethod
    def order(hooks):
        return list(hooks)


class SavesBeforeTheAverage(Loop):
    """The checkpoint is written when the optimizer has stepped, before the average follows."""

    def stepped(self):
        self.keep()
        place, self.checkpoints = self.checkpoints, None
        super().stepped()
        self.checkpoints = place
