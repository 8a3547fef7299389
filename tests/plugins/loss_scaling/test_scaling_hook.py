"""LossScalingHook through an orchestrator: scaled gradients, true updates, one back-off, nobody left half-way."""

from __future__ import annotations

import warnings
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator, UpdatePriority
from nvalchemi_hooks_loss_scaling import LossScalingHook, MixedPrecisionHook

SGD = torch.optim.SGD
OPTIMIZERS = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    "sgd-fused": lambda parameters: SGD(parameters, lr=0.1, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}


@pytest.fixture(params=["alone", "with a veto hook"])
def orchestrated(request, doubles):
    """Compose a scaling hook with other hooks, without and with a hook that turns inf into a veto for all."""
    veto = [doubles.FiniteVeto()] if request.param == "with a veto hook" else []
    return lambda *hooks: TrainingUpdateOrchestrator(*hooks, *veto)


def test_it_declares_what_it_is():
    """Priority 20, its family, its name, and that it neither reads gradients nor vetoes, so the update can fold."""
    hook = LossScalingHook()
    assert (hook.name, hook.priority, hook.exclusive_family) == ("loss_scaling", UpdatePriority.SCALE, "loss_scaling")
    [explained] = TrainingUpdateOrchestrator(hook).explain().hooks
    assert "DO_OPTIMIZER_STEP" not in explained.stages
    assert hook.reads_grad is False


def test_two_of_the_family_are_refused():
    """Loss scaling and mixed precision cannot be composed: the error names both."""
    with pytest.raises(ValueError, match="LossScalingHook and MixedPrecisionHook"):
        TrainingUpdateOrchestrator(LossScalingHook(), MixedPrecisionHook("bf16"))


def test_the_scaler_is_published_at_before_batch(scalar):
    """From BEFORE_BATCH on ctx.grad_scaler is the hook's scaler."""
    hook, weight = LossScalingHook(), scalar()
    with TrainContext(optimizers=[SGD([weight], lr=1.0)]) as ctx:
        TrainingUpdateOrchestrator(hook)(ctx, TrainingStage.BEFORE_BATCH)
        assert ctx.grad_scaler is hook.scaler


def test_a_loop_without_before_batch_is_unscaled_too(scalar):
    """A loop that starts at DO_BACKWARD has the scaler published there, and steps on true gradients."""
    update, weight = TrainingUpdateOrchestrator(LossScalingHook(init_scale=8.0)), scalar()
    optimizer = SGD([weight], lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        with TrainContext(optimizers=[optimizer]) as ctx:
            ctx.loss = weight * 1.0
            update(ctx, TrainingStage.DO_BACKWARD)
            update(ctx, TrainingStage.DO_OPTIMIZER_STEP)
            update(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
    assert weight.item() == -1.0


def test_backward_runs_on_the_scaled_loss_and_ctx_keeps_the_users_own(scalar):
    """Gradients carry the scale after DO_BACKWARD; ctx.loss is detached and what the user gave."""
    update, weight = TrainingUpdateOrchestrator(LossScalingHook(init_scale=1024.0)), scalar(2.0)
    model = torch.nn.ParameterDict({"weight": weight})
    with TrainContext(model=model, optimizers=[SGD([weight], lr=1.0)]) as ctx:
        update(ctx, TrainingStage.BEFORE_BATCH)
        ctx.loss = weight * 3.0
        update(ctx, TrainingStage.DO_BACKWARD)
        assert weight.grad.item() == 3.0 * 1024.0
        assert ctx.gradients["weight"].item() == 3.0
        assert ctx.grad_norm.item() == 3.0
        assert ctx.loss.item() == 6.0
        assert ctx.loss.grad_fn is None


@pytest.mark.parametrize("stage", [TrainingStage.SETUP, TrainingStage.BEFORE_BATCH])
def test_another_scaler_in_the_context_is_refused(stage):
    """A loss that the user's own scaler scales is an error naming both, before anything is scaled twice."""
    ctx = TrainContext(grad_scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match=r"LossScalingHook.* LossScaler, but ctx\.grad_scaler is a GradScaler"):
        TrainingUpdateOrchestrator(LossScalingHook())(ctx, stage)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@given(exponent=st.integers(-14, 32), seed=st.integers(0, 2**16))
@settings(deadline=None, max_examples=10)
def test_a_scaled_run_equals_an_unscaled_one(kind, exponent, seed, run_batch):
    """With a power of two as scale five steps give the weights of the unscaled run, to the bit, folded or not."""

    def weights(*hooks):
        generator = torch.Generator().manual_seed(seed)
        weight = torch.nn.Parameter(torch.randn(4, 3, generator=generator))
        optimizer = OPTIMIZERS[kind]([weight])
        for _ in range(5):
            data = torch.randn(8, 3, generator=generator)
            run_batch(TrainingUpdateOrchestrator(*hooks), lambda d=data: (d @ weight.T).square().mean(), [optimizer])
        return weight

    assert torch.equal(weights(LossScalingHook(init_scale=2.0**exponent)), weights())


def test_a_static_scale_trains(run_batch, scalar):
    """A number as scale works without any adaptation, also after an inf."""
    hook, weight = LossScalingHook(scale=512.0), scalar()
    update, optimizer = TrainingUpdateOrchestrator(hook), SGD([weight], lr=1.0)
    for factor in (1.0, torch.inf, 1.0):
        run_batch(update, lambda f=factor: weight * f, [optimizer])
    assert (weight.item(), hook.scaler.get_scale()) == (-1.0, 512.0)


def test_the_scheduler_moves_only_with_the_optimizer(run_batch, orchestrated, scalar):
    """Inf on batches 0 and 2 of 4: the learning rate after each batch is 1, 0.5, 0.5, 0.25, without any warning."""
    update, weight = orchestrated(LossScalingHook()), scalar()
    optimizer = SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for factor in (torch.inf, 1.0, torch.inf, 1.0):
            run_batch(update, lambda f=factor: weight * f, [optimizer], lr_schedulers=[scheduler])
            rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 0.5, 0.5, 0.25]


def test_an_inf_does_not_stay_in_the_gradients(run_batch, orchestrated, scalar):
    """Scale 1024, inf once on batch 0 of 4: one back-off to 512, and three steps to -2."""
    hook, weight = LossScalingHook(init_scale=1024.0), scalar()
    update, optimizer = orchestrated(hook), SGD([weight], lr=1.0)
    skipped = [run_batch(update, lambda f=f: weight * f, [optimizer]).step_skipped for f in (torch.inf, 1.0, 1.0, 1.0)]
    assert (hook.scaler.get_scale(), weight.item(), skipped) == (512.0, -2.0, [True, False, False, False])


@pytest.mark.parametrize("veto", ["EarlyVeto", "VetoBatches"])
def test_a_veto_on_finite_gradients_leaves_the_scaler_alone(run_batch, orchestrated, doubles, scalar, veto):
    """A veto on batch 1 of 3, before or after the scaler: scale and count as they were, and batch 2 steps."""
    hook, weight = LossScalingHook(init_scale=8.0, growth_interval=3), scalar()
    update, optimizer = orchestrated(hook, getattr(doubles, veto)(1)), SGD([weight], lr=1.0)
    states = []
    for _ in range(3):
        run_batch(update, lambda: weight * 1.0, [optimizer])
        states.append((weight.item(), hook.scaler.get_scale(), hook.state_dict()["growth_tracker"]))
    assert states == [(0.0, 8.0, 1), (0.0, 8.0, 1), (-1.0, 8.0, 2)]


@pytest.mark.parametrize("veto", ["EarlyVeto", "VetoBatches"])
def test_inf_backs_off_also_when_somebody_else_vetoes(run_batch, orchestrated, doubles, scalar, veto):
    """Found-inf is determined although another hook vetoed: one back-off, no step, and the outcome says both."""
    hook, weight = LossScalingHook(init_scale=8.0), scalar()
    update = orchestrated(hook, getattr(doubles, veto)(0))
    ctx = run_batch(update, lambda: weight * torch.inf, [SGD([weight], lr=1.0)])
    assert (hook.scaler.get_scale(), weight.item()) == (4.0, 1.0)
    assert ctx.outcome.found_inf is True
    assert ctx.outcome.vetoes


def test_an_optimizer_without_gradient_is_skipped_quietly(run_batch, orchestrated, scalar):
    """A loss that reaches only one of two optimizers: that one moves, the other stays to the bit, nothing raises."""
    a, b = scalar(), scalar()
    update = orchestrated(LossScalingHook(init_scale=8.0))
    run_batch(update, lambda: a * 1.0, [SGD([a], lr=1.0), SGD([b], lr=1.0)])
    assert (a.item(), b.item()) == (0.0, 1.0)


def test_a_clip_in_place_sees_true_gradients(run_batch, orchestrated, doubles):
    """Gradients (3, 4) at scale 1024, clipped to 1 by anybody's clip: norm 5 is seen, and (0.6, 0.8) is stepped."""
    clip, weight = doubles.ClipInPlace(), torch.nn.Parameter(torch.zeros(2))
    update = orchestrated(clip, LossScalingHook(init_scale=1024.0))
    run_batch(update, lambda: (weight * torch.tensor([3.0, 4.0])).sum(), [SGD([weight], lr=1.0)])
    assert clip.norms == [5.0]
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))


def test_a_short_window_is_unscaled_once(run_batch, orchestrated, doubles):
    """Windows of 4 with 3 batches, a scaler, a clip and a norm monitor: one step, one unscale, norm at most 1."""

    class Monitor(TrainingUpdateHook):
        priority, seen = 22, None

        def before_optimizer_step(self, ctx, *, will_skip):
            self.seen = (float(ctx.grad_norm), ctx.optimizers[0].param_groups[0]["params"][0].grad.clone())
            return True

    hook, monitor, clip = LossScalingHook(init_scale=1024.0, growth_interval=1), Monitor(), doubles.ClipInPlace()
    update = orchestrated(doubles.Accumulate(4, last=3), hook, monitor, clip)
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer, factor, scales = SGD([weight], lr=1.0), torch.tensor([1.0, 2.0]), []
    for _ in range(3):
        ctx = run_batch(update, lambda: (weight * factor).sum(), [optimizer])
        scales.append(hook.scaler.get_scale())
    assert ctx.step_skipped is False
    assert monitor.seen[0] == pytest.approx(45.0**0.5)
    assert monitor.seen[1].tolist() == [3.0, 6.0]
    assert weight.norm().item() == pytest.approx(1.0)
    assert scales == [1024.0, 1024.0, 2048.0]  # it moves when the window closes, never inside


def test_several_infinite_optimizers_make_one_back_off(run_batch, orchestrated, scalar):
    """Three optimizers with inf in one window halve the scale once."""
    hook, weights = LossScalingHook(init_scale=1024.0), [scalar() for _ in range(3)]
    run_batch(orchestrated(hook), lambda: sum(w * torch.inf for w in weights), [SGD([w], lr=1.0) for w in weights])
    assert hook.scaler.get_scale() == 512.0


def test_without_a_veto_each_optimizer_skips_for_itself(run_batch, doubles, scalar):
    """Inf in one of two: the other steps with its scheduler, as in torch; with a veto hook neither moves."""
    results = []
    for veto in ([], [doubles.FiniteVeto()]):
        hook, bad, good = LossScalingHook(init_scale=8.0), scalar(), scalar()
        optimizers = [SGD([bad], lr=1.0), SGD([good], lr=1.0)]
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]
        ctx = run_batch(
            TrainingUpdateOrchestrator(hook, *veto),
            lambda bad=bad, good=good: bad * torch.inf + good,
            optimizers,
            lr_schedulers=schedulers,
        )
        rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
        results.append((bad.item(), good.item(), rates, ctx.step_skipped, hook.scaler.get_scale()))
    assert results == [(1.0, 0.0, [1.0, 0.5], False, 4.0), (1.0, 1.0, [1.0, 1.0], True, 4.0)]


def test_the_hook_itself_waits_for_nothing(host_reads, scalar):
    """Its stages read nothing back, so the one host read of a step stays the orchestrator's."""
    hook, weight = LossScalingHook(), scalar()
    ctx = TrainContext(optimizers=[SGD([weight], lr=1.0)], models={})
    loss = weight * 1.0
    with host_reads() as cost:
        hook(ctx, TrainingStage.SETUP)
        hook(ctx, TrainingStage.BEFORE_BATCH)
        ctx.loss = loss
        hook(ctx, TrainingStage.DO_BACKWARD)
        hook(ctx, TrainingStage.DO_OPTIMIZER_STEP)
        hook(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
    assert cost.reads == []


def half(**frozen):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    model[1].bias = torch.nn.Parameter(torch.zeros(1, dtype=torch.float16), **frozen)
    return model


def test_fp16_parameters_are_refused_at_setup():
    """One fp16 parameter among fp32 ones: an error before batch 0 that names it, its model and the remedy."""
    ctx = TrainContext(models={"net": half()})
    with pytest.raises(ValueError, match=r"parameter '1\.bias' of model 'net' is in fp16.*model\.float\(\)"):
        TrainingUpdateOrchestrator(LossScalingHook())(ctx, TrainingStage.SETUP)


def test_a_frozen_fp16_parameter_is_no_contradiction():
    """What gets no gradient needs no unscaling, so a frozen fp16 teacher is welcome."""
    ctx = TrainContext(models={"teacher": half(requires_grad=False)})
    TrainingUpdateOrchestrator(LossScalingHook())(ctx, TrainingStage.SETUP)


class Remember(torch.autograd.Function):
    """Saves a tensor whose life is the life of the graph."""

    @staticmethod
    def forward(ctx, x, alive):
        saved = torch.ones(3)
        alive.append(weakref.ref(saved))
        ctx.save_for_backward(saved)
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].sum(), None


@pytest.mark.parametrize("fate", ["step", "veto", "inf", "error"])
def test_no_graph_outlives_its_batch(run_batch, orchestrated, doubles, scalar, fate):
    """After a step, a veto, an inf or an exception nothing holds the graph of the batch, and ctx.loss is detached."""

    class Fail(TrainingUpdateHook):
        def transform_loss(self, ctx, loss):
            raise RuntimeError("broken")

    other = {"veto": [doubles.VetoBatches(0)], "error": [Fail()]}.get(fate, [])
    update, weight, alive = orchestrated(LossScalingHook(), *other), scalar(), []
    factor = torch.inf if fate == "inf" else 1.0
    try:
        ctx = run_batch(update, lambda: Remember.apply(weight * factor, alive), [SGD([weight], lr=1.0)])
    except RuntimeError as error:
        assert fate == "error"  # noqa: PT017 - the other fates must not raise
        error.__traceback__ = None
    else:
        assert ctx.loss.grad_fn is None
    assert alive[0]() is None


def test_after_an_exception_the_next_batch_goes_on(run_batch, orchestrated, scalar):
    """A hook that raises once after unscaling leaves a scaler that works, with its scale as it was."""

    class FailOnce(TrainingUpdateHook):
        priority, failed = 40, False

        def before_optimizer_step(self, ctx, *, will_skip):
            if not self.failed:
                self.failed = True
                raise RuntimeError("broken once")
            return True

    hook, weight = LossScalingHook(init_scale=8.0), scalar()
    update, optimizer = orchestrated(hook, FailOnce()), SGD([weight], lr=1.0)
    with pytest.raises(RuntimeError, match="broken once"):
        run_batch(update, lambda: weight * 1.0, [optimizer])
    run_batch(update, lambda: weight * 1.0, [optimizer])
    assert (weight.item(), hook.scaler.get_scale()) == (0.0, 8.0)
