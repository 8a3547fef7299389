"""Folding: unscaling, clipping and stepping in the optimizer's own pass, bit for bit like one after the other."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.training.hooks import TrainingUpdateHook

FUSED = [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad]
SHAPES = [(7,), (33, 5), (1,)]


def tensors(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def run(make_loop, hooks, make, *, dtype=torch.float32, steps=5):
    loop = make_loop(*hooks, weights=tensors(0, dtype), optimizers=lambda ps: [make(ps[:2]), make(ps[2:])])
    for step in range(steps):
        loop.batch(*tensors(step + 1, dtype))
    return loop


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters, other.parameters, strict=True))


@pytest.fixture
def materialised(monkeypatch):
    """How often gradients were divided before a step."""
    from nvalchemi.training.hooks.gradients import OptimizerGradients

    calls = []
    real = OptimizerGradients.materialise

    def counting(self):
        if self.pending() is not None:
            calls.append(self)
        real(self)

    monkeypatch.setattr(OptimizerGradients, "materialise", counting)
    return calls


@pytest.mark.parametrize("optimizer", FUSED)
@pytest.mark.parametrize("scaled", [False, True])
def test_folded_equals_plain(make_loop, divide, read, scale, folding_scaler, materialised, optimizer, scaled):
    """Folded and plain divide once, by the same divisor, and agree bit for bit."""

    def make(parameters):
        return optimizer(parameters, lr=0.01, fused=True)

    def hooks():
        return [divide(1.7), *([scale(folding_scaler(1024.0))] if scaled else [])]

    folded = run(make_loop, hooks(), make)
    assert materialised == []
    plain = run(make_loop, [*hooks(), read()], make)
    assert len(materialised) == 2 * 5  # a reader comes after the clipping: two optimizers, five steps
    assert same(folded, plain)


@pytest.mark.parametrize("optimizer", FUSED)
def test_folding_is_the_division(make_loop, divide, optimizer):
    """A folded division is what dividing the gradients first and stepping by hand gives, bit for bit."""

    def make(parameters):
        return optimizer(parameters, lr=0.01, fused=True)

    folded, by_hand = run(make_loop, [divide(1.7)], make), run(make_loop, [], make, steps=0)
    for step in range(5):
        for parameter, gradient in zip(by_hand.parameters, tensors(step + 1), strict=True):
            parameter.grad = gradient / torch.tensor(1.7)
        for each in by_hand.optimizers:
            each.step()
    assert same(folded, by_hand)


def test_an_optimizer_that_does_not_fold_divides_first(make_loop, divide, scale, folding_scaler, materialised):
    """With an optimizer that takes no ``grad_scale`` the same division comes before its step."""
    loop = run(
        make_loop,
        [divide(2.0), scale(folding_scaler())],
        lambda ps: torch.optim.SGD(ps, lr=0.5, foreach=False),
        steps=1,
    )
    assert len(materialised) == 2
    for parameter, before, gradient in zip(loop.parameters, tensors(0), tensors(1), strict=True):
        assert torch.allclose(parameter, before - 0.25 * gradient, rtol=1e-6)


def test_fused_and_unfused_agree_under_scaling(make_loop, divide, scale, folding_scaler):
    """A fused and a plain optimizer side by side in one update see the same true gradients."""
    loop = make_loop(
        divide(4.0),
        scale(folding_scaler(1024.0)),
        weights=(1.0, 1.0),
        optimizers=lambda ps: [torch.optim.SGD([ps[0]], lr=1.0, fused=True), torch.optim.SGD([ps[1]], lr=1.0)],
    )
    loop.batch(2.0, 2.0)
    assert loop.values == [0.5, 0.5]


def test_double_precision_is_not_folded_and_exact(make_loop, divide, scale, folding_scaler, materialised):
    """Gradients in float64 are not folded, because ``grad_scale`` is float32, and are divided exactly."""

    def make(parameters):
        return torch.optim.SGD(parameters, lr=1.0, fused=True)

    by = torch.tensor(1.7, dtype=torch.float64)
    loop = run(make_loop, [divide(by), scale(folding_scaler(1024.0))], make, dtype=torch.float64, steps=1)
    assert len(materialised) == 2
    for parameter, before, gradient in zip(
        loop.parameters, tensors(0, torch.float64), tensors(1, torch.float64), strict=True
    ):
        assert torch.equal(parameter, before - (gradient * 1024.0) / (1024.0 * by))


def test_a_torch_scaler_unscales_by_itself(make_loop, divide, scale, counting_scaler):
    """With a scaler that is not ours the scaler unscales, and only the other divisors fold."""
    loop = make_loop(
        divide(2.0), scale(counting_scaler()), optimizers=lambda ps: [torch.optim.SGD(ps, lr=1.0, fused=True)]
    )
    loop.batch(4.0)
    assert loop.values == [-1.0]


def test_the_attribute_of_folding_is_gone_after_the_step(make_loop, divide):
    """After a folded step the optimizer is as it was: stepping it by hand divides nothing."""
    loop = make_loop(divide(2.0), optimizers=lambda ps: [torch.optim.SGD(ps, lr=1.0, fused=True)])
    loop.batch(2.0)
    assert not hasattr(loop.optimizers[0], "grad_scale")
    loop.parameters[0].grad = torch.tensor(1.0)
    loop.optimizers[0].step()
    assert loop.values == [-1.0]


# Readers of gradients.


@pytest.mark.parametrize("kind", ["counting_scaler", "public_scaler", "folding_scaler"])
def test_a_reader_sees_unscaled_and_clipped_gradients(make_loop, scale, divide, read, request, kind):
    """A hook that reads gradients sees unscaled ones in ``.grad``, and clipped ones after clipping's priority."""
    early, late = read("early", 22), read("late", 40)
    make_loop(scale(request.getfixturevalue(kind)()), divide(2.0), early, late, weights=(1.0, 1.0)).batch(4.0, 6.0)
    assert [[gradient.item() for gradient in hook.seen[0]] for hook in (early, late)] == [[4.0, 6.0], [2.0, 3.0]]


def test_a_hook_that_says_it_does_not_read_sees_raw_gradients(make_loop, scale, read, folding_scaler):
    """Raw ``.grad`` carries the loss scale, as in torch, for a hook with ``reads_grad = False``."""
    raw = read()
    raw.reads_grad = False
    make_loop(scale(folding_scaler(8.0)), raw).batch(3.0)
    assert raw.seen[0][0].item() == 24.0


class WatchAfter(TrainingUpdateHook):
    """Looks at ``.grad`` after the step alone, and reads it by default."""

    def after_optimizer_step(self, ctx, *, skipped):
        self.seen = ctx.models["main"].p0.grad.item()


@pytest.mark.parametrize("vetoed", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_reader_after_the_step_sees_true_gradients(make_loop, scale, veto, folding_scaler, fused, vetoed):
    """A hook that reads gradients at AFTER_OPTIMIZER_STEP sees unscaled ones, also after a veto."""
    watch = WatchAfter()
    loop = make_loop(
        scale(folding_scaler()),
        watch,
        *([veto(0)] if vetoed else []),
        optimizers=lambda ps: [torch.optim.SGD(ps, lr=1.0, fused=fused)],
    )
    loop.batch(3.0)
    assert watch.seen == 3.0


def test_a_hook_that_neither_reads_nor_decides_lets_the_update_fold(make_loop, divide, materialised):
    """A hook that overrides none of the step's methods counts as neither reading nor deciding."""

    class Halve(TrainingUpdateHook):
        def transform_loss(self, ctx, loss):
            return loss * 0.5

    run(make_loop, [Halve(), divide(1.7)], lambda ps: torch.optim.SGD(ps, lr=0.1, fused=True), steps=1)
    assert materialised == []


def test_what_follows_a_reader_still_folds(make_loop, divide, read, scale, folding_scaler, materialised):
    """Pending factors are applied before the first reader, and what follows still folds."""

    def make(parameters):
        return torch.optim.SGD(parameters, lr=0.1, fused=True)

    run(make_loop, [scale(folding_scaler()), read(priority=22), divide(1.7)], make, steps=1)
    assert len(materialised) == 2  # the loss scale for the reader, and no more


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_reader_that_changes_gradients_is_respected(make_loop, divide, in_place, fused):
    """What a hook does to ``.grad``, in place or by replacing it, counts for later norms and for the step."""

    class Double(TrainingUpdateHook):
        priority = 20

        def before_optimizer_step(self, ctx, *, will_skip):
            ctx.window.norm()  # what was computed before must be forgotten
            for parameter in ctx.models["main"].parameters():
                if in_place:
                    parameter.grad.mul_(2)
                else:
                    parameter.grad = parameter.grad * 2
            return True

    class Norm(TrainingUpdateHook):
        reads_grad = False

        def before_optimizer_step(self, ctx, *, will_skip):
            self.norm = ctx.window.norm().item()
            return True

    norm = Norm()
    loop = make_loop(
        Double(),
        divide(2.0),
        norm,
        weights=(1.0, 1.0),
        optimizers=lambda ps: [torch.optim.SGD(ps, lr=1.0, fused=fused)],
    )
    loop.batch(3.0, 4.0)
    assert norm.norm == 5.0
    assert loop.values == [-2.0, -3.0]


def test_torchs_own_clipping_in_a_hook(make_loop, scale, folding_scaler):
    """torch's own ``clip_grad_norm_`` in a reader clips true gradients: (3, 4) to norm 1."""

    class Clip(TrainingUpdateHook):
        priority = 30

        def before_optimizer_step(self, ctx, *, will_skip):
            self.norm = torch.nn.utils.clip_grad_norm_(ctx.models["main"].parameters(), 1.0).item()
            return True

    clip = Clip()
    loop = make_loop(scale(folding_scaler(1024.0)), clip, weights=(1.0, 1.0))
    loop.batch(3.0, 4.0)
    assert clip.norm == 5.0
    assert loop.values == pytest.approx([0.4, 0.2], abs=1e-5)
