"""What holds for any weights, any decay and any order."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nvalchemi.hooks import TrainContext
from nvalchemi_hooks_ema import EMAHook

histories = st.lists(st.lists(st.floats(-100, 100), min_size=3, max_size=3), min_size=1, max_size=12)
decays = st.one_of(st.sampled_from([0.0, 0.5, 0.9, 0.999]), st.floats(0.0, 0.9999))


class Weights(nn.Module):
    """Parameters with the given names, all float64."""

    def __init__(self, names):
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(3, dtype=torch.float64)))


def follow(hook: EMAHook, model: nn.Module, step: int) -> None:
    hook.after_optimizer_step(TrainContext(models={"main": model}, step_count=step), skipped=False)


@settings(deadline=None, max_examples=60)
@given(histories, decays)
def test_the_average_equals_its_closed_form(history, decay):
    """After n updates the average is d^(n-1) w_1 + (1-d) sum over k > 1 of d^(n-k) w_k."""
    model, hook = Weights(["w"]), EMAHook(decay=decay)
    for step, values in enumerate(history):
        model.w.data = torch.tensor(values, dtype=torch.float64)
        follow(hook, model, step)
    n = len(history)
    factors = [decay ** (n - 1), *((1 - decay) * decay ** (n - k) for k in range(2, n + 1))]
    expected = [sum(f * values[i] for f, values in zip(factors, history, strict=True)) for i in range(3)]
    assert hook.get_averaged_model().module.w.tolist() == pytest.approx(expected, abs=1e-9)
    assert sum(factors) == pytest.approx(1.0)


@settings(deadline=None, max_examples=30)
@given(st.permutations(["a", "b", "c", "d", "e"]), st.integers(0, 2**32), decays)
def test_the_order_of_parameters_does_not_matter(order, seed, decay):
    """A model whose parameters were registered in another order has the same average, bit for bit."""
    models = [Weights(sorted(order)), Weights(order)]
    hooks = [EMAHook(decay=decay) for _ in models]
    for step in range(3):
        generator = random.Random(seed + step)
        values = {name: [generator.uniform(-1, 1) for _ in range(3)] for name in sorted(order)}
        for model, hook in zip(models, hooks, strict=True):
            for name, parameter in model.named_parameters():
                parameter.data = torch.tensor(values[name], dtype=torch.float64)
            follow(hook, model, step)
    one, other = (dict(hook.get_averaged_model().module.named_parameters()) for hook in hooks)
    assert all(torch.equal(one[name], other[name]) for name in order)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.booleans(), max_size=15), decays)
def test_skipped_steps_might_as_well_not_have_been(skips, decay):
    """Training with skipped steps leaves the average of the executed ones alone, bit for bit."""
    model, with_skips, without = Weights(["w"]), EMAHook(decay=decay), EMAHook(decay=decay)
    for place, skipped in enumerate(skips):
        if not skipped:
            model.w.data = torch.full((3,), float(place), dtype=torch.float64)
            follow(without, model, place)
        ctx = TrainContext(models={"main": model}, step_count=place)
        with_skips.after_optimizer_step(ctx, skipped=skipped)
    assert with_skips.num_updates == without.num_updates == skips.count(False)
    if without.num_updates:
        one, other = with_skips.get_averaged_model(), without.get_averaged_model()
        assert torch.equal(one.module.w, other.module.w)


@settings(deadline=None, max_examples=30)
@given(st.floats(-1e6, 1e6), decays, st.integers(1, 8))
def test_constant_weights_are_their_own_average(value, decay, updates):
    """However often weights that do not change are averaged, the average is exactly these weights."""
    model, hook = Weights(["w"]), EMAHook(decay=decay)
    model.w.data = torch.full((3,), value, dtype=torch.float64)
    for step in range(updates):
        follow(hook, model, step)
    assert torch.equal(hook.get_averaged_model().module.w, model.w)
