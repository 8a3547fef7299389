"""What is noticed between two updates, however cheaply it is looked for."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from nvalchemi_hooks_ema.fingerprint import Fingerprint


class Counts(nn.Linear):
    """A child that thinks itself equal to every other."""

    def __eq__(self, other):
        return True

    __hash__ = nn.Module.__hash__


class Own(torch.Tensor):
    """A subclass whose comparison is a plain bool."""

    def __eq__(self, other):
        return True

    __hash__ = torch.Tensor.__hash__


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1), Counts(1, 1, bias=False), nn.Conv2d(2, 2, 3, bias=False))
    model.register_buffer("missing", None)
    model.register_buffer("nothing", torch.zeros(0))
    model.register_buffer("own", torch.zeros(3).as_subclass(Own))
    return model


def replace_child(model: nn.Module, place: int) -> None:
    model[place] = copy.deepcopy(model[place])


def swap_names(model: nn.Module) -> None:
    weight = model[0]._parameters.pop("weight")
    model[0]._parameters["kernel"] = weight


CHANGES = {
    "a parameter replaced by an equal one": lambda m: setattr(
        m[0], "weight", nn.Parameter(m[0].weight.detach().clone())
    ),
    "one number replaced by an equal one": lambda m: setattr(m[0], "bias", nn.Parameter(m[0].bias.detach().clone())),
    "one number, equal and of another dtype": lambda m: setattr(m[1], "running_var", m[1].running_var.double()),
    "a tensor without elements replaced": lambda m: setattr(m, "nothing", torch.zeros(0, dtype=torch.float64)),
    "a subclass replaced": lambda m: setattr(m, "own", torch.zeros(3).as_subclass(Own)),
    "a 0-dim buffer replaced": lambda m: setattr(m[1], "num_batches_tracked", m[1].num_batches_tracked.clone()),
    "another shape": lambda m: setattr(m[0], "weight", nn.Parameter(torch.zeros(1, 4))),
    "a parameter gone": lambda m: setattr(m[0], "bias", None),
    "a parameter deleted": lambda m: delattr(m[0], "bias"),
    "a buffer come": lambda m: setattr(m, "missing", torch.zeros(2)),
    "a buffer registered on a leaf": lambda m: m[0].register_buffer("scale", torch.ones(1)),
    "a child come": lambda m: m[0].add_module("adapter", nn.Linear(1, 1)),
    "a child replaced": lambda m: replace_child(m, 0),
    "a child replaced by one that claims to be equal": lambda m: replace_child(m, 2),
    "another name": swap_names,
    "another dtype": lambda m: m.double(),
    "another dtype of one child": lambda m: m[0].half(),
    "other memory": lambda m: setattr(m[0].weight, "data", m[0].weight.detach().clone()),
    "another layout": lambda m: m.to(memory_format=torch.channels_last),
    "frozen to meta": lambda m: m.to("meta"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_it_shows(change):
    """What was changed in a model shows at the next look, also where the new tensor equals the old one."""
    model = net()
    taken = Fingerprint(model.modules())
    assert taken.holds()
    CHANGES[change](model)
    assert not taken.holds()


def test_what_training_does_is_no_change():
    """Steps, gradients, modes, statistics written in place: the model holds the same tensors as before."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    taken = Fingerprint(model.modules())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval().requires_grad_(False)
    assert taken.holds()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_leads_to_the_first_parameter_is_watched(depth):
    """A child exchanged on the way to the first parameter shows, wherever that parameter is."""
    model: nn.Module = nn.Linear(1, 1)
    for _ in range(depth):
        model = nn.Sequential(model, nn.Linear(1, 1))
    taken = Fingerprint.of_first_parameter(model)
    assert taken.holds()
    if depth:
        model[0] = copy.deepcopy(model[0])
    else:
        model.weight = nn.Parameter(model.weight.detach().clone())
    assert not taken.holds()
