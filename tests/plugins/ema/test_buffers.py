"""What becomes of buffers."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from nvalchemi_hooks_ema import EMAHook


def train_batch_norm(hook: EMAHook, follow, rounds: int) -> nn.BatchNorm1d:
    model = nn.BatchNorm1d(2)
    generator = torch.Generator().manual_seed(0)
    for step in range(rounds):
        model(torch.randn(8, 2, generator=generator) + 5)
        follow(hook, model, step)
    return model


def test_floating_buffers_are_averaged(follow):
    """By default running statistics follow the same rule as the weights."""
    hook = EMAHook(decay=0.5)
    model = nn.BatchNorm1d(1)
    for step, mean in enumerate((2.0, 4.0)):
        model.running_mean.fill_(mean)
        follow(hook, model, step)
    assert hook.get_averaged_model().module.running_mean.item() == 3.0


def test_without_use_buffers_all_buffers_are_copied(follow):
    """With use_buffers=False the average has the running statistics of the live model."""
    hook = EMAHook(decay=0.9, use_buffers=False)
    model = train_batch_norm(hook, follow, 3)
    module = hook.get_averaged_model().module
    for (name, own), live in zip(module.named_buffers(), model.buffers(), strict=True):
        assert torch.equal(own, live), name


@pytest.mark.parametrize("use_buffers", [True, False])
def test_integer_buffers_are_copied_never_averaged(use_buffers, follow):
    """After five rounds num_batches_tracked is 5 in the average too, and still an int64."""
    hook = EMAHook(decay=0.9, use_buffers=use_buffers)
    train_batch_norm(hook, follow, 5)
    counted = hook.get_averaged_model().module.num_batches_tracked
    assert (counted.item(), counted.dtype) == (5, torch.int64)


def test_boolean_buffers_are_copied(follow):
    """A mask in the average is the mask of the live model."""
    model = nn.Linear(1, 1)
    model.register_buffer("mask", torch.tensor([True, False]))
    hook = EMAHook(decay=0.9)
    follow(hook, model, 0)
    model.mask.logical_not_()
    follow(hook, model, 1)
    assert hook.get_averaged_model().module.mask.tolist() == [False, True]


def test_buffers_outside_the_state_dict_are_averaged_too(follow):
    """A non-persistent floating buffer follows the rule of the others."""
    model = nn.Linear(1, 1)
    model.register_buffer("scale", torch.zeros(1), persistent=False)
    hook = EMAHook(decay=0.75)
    for step, value in enumerate((0.0, 4.0)):
        model.scale.fill_(value)
        follow(hook, model, step)
    assert hook.get_averaged_model().module.scale.item() == 1.0


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_the_unit_vectors_of_spectral_norm_are_copied(norm, follow, perturb, context):
    """Old and new spectral norm keep the vectors of the live model, of length 1, while the weights are averaged."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = nn.Sequential(norm(nn.Linear(3, 4)))
    hook = EMAHook(decay=0.5)
    hook.setup(context(model))
    for step in range(4):
        perturb(nn.ParameterList(model.parameters()), step)
        model(torch.ones(2, 3)).sum().backward()
        follow(hook, model, step)
    live, module = dict(model.named_buffers()), hook.get_averaged_model().module
    assert len(live) == 2
    for name, vector in module.named_buffers():
        assert torch.equal(vector, live[name]), name
        assert vector.norm().item() == pytest.approx(1.0, abs=1e-6)
    weights = dict(model.named_parameters())
    assert all(not torch.equal(p, weights[name]) for name, p in module.named_parameters())
