"""The scaler in ``ctx.grad_scaler`` is driven by the orchestrator alone: torch's, or somebody else's."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from nvalchemi.training import TrainingStage
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


@pytest.fixture(params=["counting_scaler", "public_scaler"])
def driven(request):
    """A scaler with the public interface of torch's: torch's own, and somebody else's."""
    return request.getfixturevalue(request.param)()


# A good step.


def test_unscaled_once_stepped_and_updated_once(make_loop, scale, counting_scaler, two_optimizers):
    """At most one ``unscale_`` an optimizer and window, and ``update`` exactly once."""
    scaler = counting_scaler()
    loop = make_loop(scale(scaler), weights=(1.0, 1.0), optimizers=two_optimizers)
    loop.batch(1.0, 2.0)
    assert loop.values == [0.0, -1.0]
    assert list(scaler.unscaled.values()) == [1, 1]
    assert scaler.log.count("update") == 1
    assert scaler.log[-1] == "update"


def test_whoever_asks_for_true_gradients(make_loop, scale, read, divide, counting_scaler):
    """At most one ``unscale_``, also with several hooks that read gradients, ask for norms and divide."""

    class Norm(TrainingUpdateHook):
        def before_optimizer_step(self, ctx, *, will_skip):
            self.seen = (ctx.grad_norm.item(), ctx.window.norm().item(), ctx.gradients["p0"].item())
            return True

    scaler = counting_scaler()
    norm = Norm()
    loop = make_loop(scale(scaler), read("a"), norm, read("b", 60), divide(2.0), read("c", 70))
    for _ in range(2):
        loop.batch(3.0)
    assert scaler.log == ["unscale_", "step", "update"] * 2
    assert norm.seen == (3.0, 1.5, 1.5)
    assert loop.values == [1.0 - 3.0]


def test_good_steps_let_the_scale_grow(make_loop, scale, counting_scaler):
    """Executed steps count towards growth as with torch's own loop."""
    scaler = counting_scaler(growth_interval=3)
    loop = make_loop(scale(scaler))
    seen = []
    for _ in range(6):
        loop.batch(1.0)
        seen.append(scaler.get_scale())
    assert seen == [8, 8, 16, 16, 16, 32]


def test_the_orchestrator_never_scales_a_loss(make_loop, counting_scaler):
    """The orchestrator never scales a loss itself, also with a scaler in the context."""
    loop = make_loop()
    ctx = loop.context(grad_scaler=counting_scaler())
    loop.orchestrator(ctx, TrainingStage.BEFORE_BATCH)
    ctx.loss = loop.loss(3.0)
    loop.orchestrator(ctx, TrainingStage.DO_BACKWARD)
    assert loop.grads == [3.0]


def test_a_disabled_scaler_is_none(make_loop, scale, counting_scaler, folding_scaler):
    """A disabled scaler is as good as none."""
    for scaler in (counting_scaler(enabled=False), folding_scaler(1.0, enabled=False)):
        loop = make_loop(scale(scaler))
        loop.batch(3.0)
        assert loop.values == [-2.0]
        assert getattr(scaler, "log", []) == []
        assert getattr(scaler, "closed", []) == []


# A veto on finite gradients.


@pytest.mark.parametrize("priority", [10, 50])
@pytest.mark.parametrize("reader", [False, True])
def test_a_veto_on_finite_gradients_leaves_the_scaler_alone(
    make_loop, scale, veto, read, counting_scaler, priority, reader
):
    """A veto on finite gradients leaves scale and growth counter as they were, and the next window works."""
    scaler = counting_scaler(growth_interval=3)
    loop = make_loop(scale(scaler), veto(1, priority=priority), *([read(priority=22)] if reader else []))
    seen = []
    for _ in range(4):
        loop.batch(1.0)
        seen.append((scaler.get_scale(), scaler.tracker))
    assert seen == [(8.0, 1), (8.0, 1), (8.0, 2), (16.0, 0)]
    assert loop.values == [1.0 - 3.0]


@pytest.mark.parametrize("priority", [10, 50])
def test_a_veto_after_unscaling(make_loop, scale, veto, read, driven, priority):
    """A veto after gradients were unscaled closes the window all the same, without growth or back-off."""
    loop = make_loop(scale(driven), read(priority=22), veto(1, priority=priority))
    for _ in range(3):
        loop.batch(1.0)
    assert driven.get_scale() == 8.0
    assert loop.values == [1.0 - 2.0]


def test_a_veto_on_the_very_first_window(make_loop, scale, read, veto, driven):
    """A veto in the first window of a run does not upset a scaler that has not updated yet."""
    loop = make_loop(scale(driven), read(), veto(0))
    for _ in range(2):
        loop.batch(1.0)
    assert (driven.get_scale(), loop.values) == (8.0, [0.0])


# Found-inf.


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_found_inf_backs_off_once_and_skips(make_loop, scale, driven, bad):
    """Found-inf makes exactly one back-off and no step; the gradients do not reach the next window."""
    loop = make_loop(scale(driven), schedulers=lambda os: [StepLR(os[0], 1, 0.5)])
    ctx = loop.batch(bad)
    assert ctx.step_skipped
    assert ctx.outcome.found_inf
    assert ctx.outcome.vetoes == ()
    assert [(o.stepped, o.reason) for o in ctx.outcome.optimizers] == [(False, "gradients are not finite")]
    assert driven.get_scale() == 4.0
    loop.batch(1.0)
    assert (driven.get_scale(), loop.values) == (4.0, [0.0])


def test_a_schedule_with_two_infs(make_loop, scale, driven):
    """An inf on batches 0 and 2 of 4: the learning rate is that of executed steps."""
    loop = make_loop(scale(driven), schedulers=lambda os: [StepLR(os[0], 1, 0.5)])
    seen = []
    for gradient in (INF, 1.0, INF, 1.0):
        loop.batch(gradient)
        seen.append(loop.optimizers[0].param_groups[0]["lr"])
    assert seen == [1.0, 0.5, 0.5, 0.25]


@pytest.mark.parametrize("gradients", [(INF, 1.0), (1.0, NAN), (INF, INF)])
@pytest.mark.parametrize("hooks", [[], [CheckFinite()], [AlwaysVeto()], [CheckFinite(), AlwaysVeto()]])
def test_one_back_off_however_many_optimizers(make_loop, scale, driven, two_optimizers, gradients, hooks):
    """Found-inf makes exactly one back-off, however many optimizers found it, and whoever vetoed."""
    loop = make_loop(scale(driven), *hooks, weights=(1.0, 1.0), optimizers=two_optimizers)
    ctx = loop.batch(*gradients)
    assert driven.get_scale() == 4.0
    assert ctx.outcome.found_inf
    loop.orchestrator = type(loop.orchestrator)(scale(driven))
    before = loop.values
    loop.batch(1.0, 1.0)
    assert loop.values == [value - 1.0 for value in before]


@pytest.mark.parametrize("priority", [5, 19, 50])
def test_found_inf_is_determined_also_when_an_earlier_child_vetoed(make_loop, scale, veto, driven, priority):
    """Found-inf is determined also when an earlier child vetoed: the scale backs off once."""
    loop = make_loop(scale(driven), veto(0, priority=priority))
    ctx = loop.batch(INF)
    assert ctx.outcome.found_inf
    assert [veto.hook for veto in ctx.outcome.vetoes] == ["veto"]
    assert driven.get_scale() == 4.0


def test_without_a_veto_hook_each_optimizer_skips_for_itself(make_loop, scale, driven, two_optimizers):
    """Without the veto hook, torch's rule holds: each optimizer skips for itself, and its scheduler with it."""
    loop = make_loop(
        scale(driven),
        weights=(1.0, 1.0),
        optimizers=two_optimizers,
        schedulers=lambda os: [StepLR(o, 1, 0.5) for o in os],
    )
    ctx = loop.batch(INF, 1.0)
    assert loop.values == [1.0, 0.0]
    assert [o.param_groups[0]["lr"] for o in loop.optimizers] == [1.0, 0.5]
    assert [o.stepped for o in ctx.outcome.optimizers] == [False, True]
    assert not ctx.step_skipped
    assert driven.get_scale() == 4.0


def test_with_a_veto_hook_none_steps(make_loop, scale, driven, two_optimizers):
    """With a hook that turns found-inf into a veto, no optimizer steps."""
    loop = make_loop(scale(driven), CheckFinite(), weights=(1.0, 1.0), optimizers=two_optimizers)
    ctx = loop.batch(INF, 1.0)
    assert loop.values == [1.0, 1.0]
    assert [veto.reason for veto in ctx.outcome.vetoes] == ["gradients are not finite"]


def test_an_optimizer_without_gradient_beside_a_scaler(make_loop, scale, driven, two_optimizers):
    """An optimizer without any gradient is skipped quietly, and the scaler closes its window."""
    loop = make_loop(scale(driven), weights=(1.0, 2.0), optimizers=two_optimizers)
    for _ in range(2):
        loop.batch(1.0, None)
    assert loop.values == [-1.0, 2.0]
    assert driven.get_scale() == 8.0


def test_no_gradient_at_all_beside_a_scaler(make_loop, scale, driven):
    """A window without any gradient moves no scaler, and the next one works."""
    loop = make_loop(scale(driven), weights=(1.0, 2.0))
    assert loop.batch(None, None).step_skipped
    loop.batch(1.0, 1.0)
    assert (loop.values, driven.get_scale()) == ([0.0, 1.0], 8.0)


@pytest.mark.parametrize("reader", [False, True])
def test_a_veto_that_means_found_inf_backs_off_once(make_loop, scale, read, driven, reader):
    """A veto deferred with ``found_inf=True`` makes the scaler back off once though each gradient is finite."""
    loop = make_loop(scale(driven), Overflow(), *([read()] if reader else []))
    ctx = loop.batch(1.0)
    assert (ctx.outcome.found_inf, ctx.step_skipped) == (True, True)
    assert (driven.get_scale(), loop.values) == (4.0, [1.0])


def test_found_inf_stays_what_the_backward_pass_left(make_loop, scale, driven):
    """A hook that hides an inf from ``.grad`` does not hide it from the scaler."""

    class Hide(TrainingUpdateHook):
        def before_optimizer_step(self, ctx, *, will_skip):
            for tensor in ctx.window.tensors():
                tensor.nan_to_num_(0.0, 0.0, 0.0)
            return True

    loop = make_loop(scale(driven), Hide())
    ctx = loop.batch(INF)
    assert (ctx.outcome.found_inf, driven.get_scale(), loop.values) == (True, 4.0, [1.0])
