"""Laws of composing update hooks."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.training.hooks import TrainingUpdateHook

LAWFUL = settings(deadline=None, max_examples=25)
PRIORITIES = st.integers(0, 60)
INF = float("inf")


class Vote(TrainingUpdateHook):
    """Votes as it is told: at once, or with a flag that stays on the device."""

    def __init__(self, label, kind, priority, reads):
        self.labelled(label)
        self.kind, self.priority = kind, priority
        self.reads_grad = reads
        self.defers_veto = kind in ("flag", "no flag", "nan flag")

    def before_optimizer_step(self, ctx, *, will_skip):
        if self.defers_veto:
            ctx.defer_veto(torch.tensor({"flag": 1.0, "no flag": 0.0, "nan flag": float("nan")}[self.kind]), "told to")
            return True
        return self.kind != "veto"


KINDS = st.sampled_from(["pass", "pass", "no flag", "no flag", "veto", "flag", "nan flag"])
VOTES = st.lists(st.tuples(KINDS, PRIORITIES, st.booleans()), max_size=5)


@LAWFUL
@given(votes=VOTES, order=st.randoms(use_true_random=False), gradient=st.sampled_from([1.0, INF]), scaled=st.booleans())
def test_a_veto_does_not_depend_on_the_order(make_loop, scale, public_scaler, votes, order, gradient, scaled):
    """Whether the step is vetoed, and what the scaler does, depends on the votes and not on the order of hooks."""
    shuffled = list(enumerate(votes))
    order.shuffle(shuffled)
    scaler = public_scaler()
    hooks = [Vote(f"hook {number}", *vote) for number, vote in shuffled]
    loop = make_loop(*hooks, *([scale(scaler)] if scaled else []))
    ctx = loop.batch(gradient)
    vetoes = {f"hook {number}" for number, (kind, *_) in enumerate(votes) if kind in ("veto", "flag", "nan flag")}
    found_inf = scaled and gradient == INF
    assert {veto.hook for veto in ctx.outcome.vetoes} == vetoes
    assert ctx.step_skipped == (bool(vetoes) or found_inf)
    assert loop.values == [1.0 if ctx.step_skipped else 1.0 - gradient]
    assert ctx.outcome.found_inf == found_inf
    assert scaler.get_scale() == (4.0 if found_inf else 8.0)


class Affine(TrainingUpdateHook):
    """Transforms loss and gradients in a way whose order matters."""

    def __init__(self, label, priority, factor):
        self.labelled(label)
        self.priority, self.factor = priority, factor

    def transform_loss(self, ctx, loss):
        return torch.sin(loss * self.factor) + loss

    def before_optimizer_step(self, ctx, *, will_skip):
        for tensor in ctx.window.tensors():
            tensor.mul_(self.factor).add_(0.1)
        return self.factor < 1.9 or ctx.batch_count != 1


@LAWFUL
@given(
    hooks=st.lists(st.tuples(PRIORITIES, st.floats(0.5, 2.0)), min_size=2, max_size=5, unique_by=lambda hook: hook[0]),
    order=st.randoms(use_true_random=False),
    fused=st.booleans(),
)
def test_insertion_of_distinct_priorities_changes_nothing(make_loop, hooks, order, fused):
    """Permuting the insertion of hooks with distinct priorities changes nothing, bit for bit."""
    shuffled = list(hooks)
    order.shuffle(shuffled)
    loops = [
        make_loop(
            *(Affine(str(priority), priority, factor) for priority, factor in some),
            weights=(torch.ones(3),),
            optimizers=lambda ps: [torch.optim.SGD(ps, lr=0.1, fused=fused)],
        )
        for some in (hooks, shuffled)
    ]
    for batch in range(3):
        for loop in loops:
            loop.batch(torch.tensor([0.3, -0.2, 0.1]) * (batch + 1))
    assert torch.equal(loops[0].parameters[0], loops[1].parameters[0])


def test_the_law_of_insertion_is_about_something(make_loop):
    """Other priorities do change the result, so the law above says something."""
    results = {
        tuple(
            make_loop(
                *(Affine(str(i), p, f) for i, (p, f) in enumerate(zip(places, (0.5, 1.5), strict=True))), weights=(1.0,)
            )
            .batch(1.0)
            .models["main"]
            .p0.detach()
            .reshape(1)
            .tolist()
        )
        for places in itertools.permutations((10, 20))
    }
    assert len(results) == 2


@LAWFUL
@given(power=st.integers(-10, 16), gradients=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=6))
@pytest.mark.parametrize("kind", ["counting_scaler", "public_scaler", "folding_scaler"])
@pytest.mark.parametrize("fused", [False, True])
def test_scaling_then_unscaling_is_the_identity(make_loop, scale, request, kind, fused, power, gradients):
    """Scaling by a power of two and unscaling is the identity: training is the same, bit for bit, whoever scales."""
    make = request.getfixturevalue(kind)
    scaler = make(init_scale=2.0**power) if kind == "counting_scaler" else make(2.0**power)
    loops = [
        make_loop(*hooks, optimizers=lambda ps: [torch.optim.SGD(ps, lr=0.1, fused=fused)])
        for hooks in ([], [scale(scaler)])
    ]
    for gradient in gradients:
        for loop in loops:
            loop.batch(gradient)
    assert loops[0].values == loops[1].values
