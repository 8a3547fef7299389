"""A scaler that folds: it hands out its divisor, and is told once how each window ended."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.hooks import GradientScaler
from nvalchemi.training.hooks import AlwaysVeto, TrainingUpdateHook

INF = float("inf")
NAN = float("nan")


class CheckFinite(TrainingUpdateHook):
    """Vetoes all optimizers when any gradient is not finite."""

    reads_grad = False
    defers_veto = True
    priority = 25

    def before_optimizer_step(self, ctx, *, will_skip):
        ctx.defer_veto(ctx.window.nonfinite(), "gradients are not finite", found_inf=True)
        return True


class Overflow(TrainingUpdateHook):
    """Says that gradients are not finite although each of them is, as a norm that overflows does."""

    reads_grad = False
    defers_veto = True

    def before_optimizer_step(self, ctx, *, will_skip):
        ctx.defer_veto(torch.tensor(1.0), "the norm overflows", found_inf=True)
        return True


def test_the_double_has_the_protocol(folding_scaler, counting_scaler, public_scaler):
    """A scaler that folds is known by its protocol; torch's and its like are not taken for one."""
    assert isinstance(folding_scaler(), GradientScaler)
    assert not isinstance(counting_scaler(), GradientScaler)
    assert not isinstance(public_scaler(), GradientScaler)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("gradients", "hooks", "told"),
    [
        ((1.0, 1.0), [], False),
        ((INF, 1.0), [], True),
        ((INF, NAN), [], True),
        ((1.0, 1.0), [AlwaysVeto()], None),
        ((INF, 1.0), [AlwaysVeto()], True),
        ((1.0, INF), [CheckFinite()], True),
        ((1.0, 1.0), [Overflow()], True),
        ((None, None), [], None),
        ((1.0, None), [], False),
    ],
)
def test_its_window_is_closed_once(make_loop, scale, folding_scaler, fused, gradients, hooks, told):
    """``close`` is called exactly once a window: True to back off, False for a good step, None for neither."""
    scaler = folding_scaler()
    loop = make_loop(
        scale(scaler),
        *hooks,
        weights=(1.0, 1.0),
        optimizers=lambda ps: [torch.optim.SGD([p], lr=1.0, fused=fused) for p in ps],
    )
    loop.batch(*gradients)
    assert scaler.closed == [told]


@pytest.mark.parametrize("fused", [False, True])
def test_its_gradients_are_divided_once(make_loop, scale, folding_scaler, fused):
    """Its loss scale is divided out once, in the optimizer's own pass or before it."""
    loop = make_loop(scale(folding_scaler(1024.0)), optimizers=lambda ps: [torch.optim.SGD(ps, lr=1.0, fused=fused)])
    for _ in range(2):
        loop.batch(3.0)
    assert loop.values == [1.0 - 6.0]


@pytest.mark.parametrize("kind", ["counting_scaler", "public_scaler", "folding_scaler"])
@pytest.mark.parametrize("vetoed", [False, True])
def test_true_gradients_after_the_step(make_loop, scale, request, kind, vetoed):
    """``ctx.gradients`` and ``ctx.grad_norm`` are true also after the step, or after it was vetoed."""
    loop = make_loop(scale(request.getfixturevalue(kind)()), *([AlwaysVeto()] if vetoed else []), weights=(1.0, 1.0))
    ctx = loop.batch(3.0, 4.0)
    assert {name: grad.item() for name, grad in ctx.gradients.items()} == {"p0": 3.0, "p1": 4.0}
    assert ctx.grad_norm.item() == 5.0
