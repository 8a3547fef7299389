"""What clipping makes of gradients that are finite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nvalchemi.hooks import TrainContext
from nvalchemi.testing import AccumulatingHook, UpdateLoop
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator, UpdatePriority
from nvalchemi_hooks_grad_clip import GradientClipHook

SCALERS = pytest.mark.parametrize("scaled", [False, True], ids=["no scaler", "torch's scaler"])


def scaler_of(scaled, scale=1024.0, **options):
    return torch.amp.GradScaler("cpu", init_scale=scale, **options) if scaled else None


@SCALERS
def test_true_gradients_are_clipped_whatever_the_loss_scale(zeros, sgd, scaled):
    """Gradients (3, 4) under a loss scale of 1024 become (0.6, 0.8), and the norm is reported as 5."""
    weight, hook = zeros(2), GradientClipHook(max_norm=1.0)
    UpdateLoop(hook, optimizers=[sgd(weight)], scaler=scaler_of(scaled)).batch({weight: [3.0, 4.0]})
    assert weight.tolist() == pytest.approx([-0.6, -0.8], rel=1e-6)
    assert hook.last_norm == pytest.approx(5.0)


def test_gradients_below_the_threshold_stay_as_they_are(zeros, sgd):
    """A norm below max_norm changes no bit of the step."""
    weight = zeros(2)
    UpdateLoop(GradientClipHook(max_norm=5.1), optimizers=[sgd(weight)]).batch({weight: [3.0, 4.0]})
    assert weight.tolist() == [-3.0, -4.0]


@SCALERS
def test_a_window_is_clipped_once_and_whole(zeros, sgd, scaled):
    """Micro-batch gradients (3, 0) and (0, 4) are summed and then clipped to (0.6, 0.8)."""
    weight, hook = zeros(2), GradientClipHook(max_norm=1.0)
    run = UpdateLoop(AccumulatingHook(every=2), hook, optimizers=[sgd(weight)], scaler=scaler_of(scaled))
    run.batch({weight: [3.0, 0.0]})
    assert math.isnan(hook.last_norm)
    run.batch({weight: [0.0, 4.0]})
    assert weight.tolist() == pytest.approx([-0.6, -0.8], rel=1e-6)
    assert (hook.measured_steps, hook.clipped_steps) == (1, 1)


class Monitor(TrainingUpdateHook):
    """Looks at the gradients that the optimizer is going to see."""

    def before_optimizer_step(self, ctx, *, will_skip):
        self.seen = torch.cat([p.grad.flatten() for o in ctx.optimizers for g in o.param_groups for p in g["params"]])
        return True


@SCALERS
def test_a_short_window_is_unscaled_once(zeros, sgd, scaled):
    """Scaler, clipping and a reader share one unscale in a window that three of four batches complete."""
    weight, monitor = zeros(2), Monitor()
    run = UpdateLoop(
        AccumulatingHook(every=3), GradientClipHook(), monitor, optimizers=[sgd(weight)], scaler=scaler_of(scaled)
    )
    for _ in range(3):
        run.batch({weight: [3.0, 4.0]})
    assert run.steps == 1
    assert monitor.seen.norm() <= 1.0
    assert run.scaler is None or run.scaler.get_scale() == 1024.0


def test_one_norm_over_all_groups_and_optimizers(zeros, sgd):
    """Gradients 3 and 4 in two groups, or two optimizers, become 0.6 and 0.8: the direction of the step is kept."""
    for split in (False, True):
        a, b, hook = zeros(), zeros(), GradientClipHook(max_norm=1.0)
        groups = [{"params": [a]}, {"params": [b]}]
        optimizers = [sgd(a), sgd(b)] if split else [torch.optim.SGD(groups, lr=1.0)]
        UpdateLoop(hook, optimizers=optimizers).batch({a: 3.0, b: 4.0})
        assert (a.item(), b.item()) == (pytest.approx(-0.6), pytest.approx(-0.8))
        assert hook.last_norm == pytest.approx(5.0)


@SCALERS
def test_per_optimizer_clips_each_by_its_own_norm(zeros, sgd, scaled):
    """With per_optimizer every optimizer has its own threshold; the global norm and theirs are reported."""
    a, b, c, hook = zeros(), zeros(), zeros(), GradientClipHook(max_norm=1.0, per_optimizer=True)
    run = UpdateLoop(hook, optimizers=[sgd(a), sgd(b), sgd(c)], scaler=scaler_of(scaled))
    run.batch({a: 3.0, b: 4.0, c: 0.5})
    assert [p.item() for p in (a, b, c)] == pytest.approx([-1.0, -1.0, -0.5], rel=1e-5)
    assert hook.last_norms == pytest.approx((3.0, 4.0, 0.5))
    assert hook.last_norm == pytest.approx(math.sqrt(25.25))


def test_a_generator_of_parameters_is_no_trap(zeros):
    """An optimizer made from a generator is clipped in the second window as in the first."""
    weights = [zeros(2), zeros(2)]
    run = UpdateLoop(GradientClipHook(), optimizers=[torch.optim.SGD((w for w in weights), lr=1.0)])
    for _ in range(2):
        before = [w.detach().clone() for w in weights]
        run.batch({w: [3.0, 4.0] for w in weights})
        moved = torch.cat([new.detach() - old for new, old in zip(weights, before, strict=True)])
        assert moved.norm().item() == pytest.approx(1.0, rel=1e-5)


@SCALERS
def test_sparse_gradients_are_clipped_by_their_coalesced_values(scaled):
    """An embedding met at 1, 1, 2 has the norm sqrt(20), and 1.0 after clipping."""
    table, hook = nn.Embedding(10, 4, sparse=True), GradientClipHook(max_norm=1.0)
    before = table.weight.detach().clone()
    run = UpdateLoop(hook, optimizers=[torch.optim.SGD(table.parameters(), lr=1.0)], scaler=scaler_of(scaled))
    run.batch(table(torch.tensor([1, 1, 2])).sum())
    assert hook.last_norm == pytest.approx(math.sqrt(20.0))
    assert (table.weight.detach() - before).norm().item() == pytest.approx(1.0, rel=1e-5)


def test_mixed_dtypes_share_one_norm(zeros, sgd):
    """An fp16 gradient of 3 and an fp32 gradient of 4 have norm 5 and become 0.6001 (in fp16) and 0.8."""
    half, single, hook = zeros(1, dtype=torch.float16), zeros(1), GradientClipHook(max_norm=1.0)
    UpdateLoop(hook, optimizers=[sgd(half, single)]).batch({half: 3.0, single: 4.0})
    assert hook.last_norm == 5.0
    assert half.item() == pytest.approx(-0.6001, abs=1e-4)
    assert single.item() == pytest.approx(-0.8)


def test_fp16_gradients_do_not_overflow_the_norm(zeros, sgd):
    """Gradients of 60000 in fp16, whose norm no fp16 number can hold, are clipped and not vetoed."""
    weight, hook = zeros(4, dtype=torch.float16), GradientClipHook(max_norm=1.0)
    ctx = UpdateLoop(hook, optimizers=[sgd(weight)]).batch({weight: 60000.0})
    assert not ctx.step_skipped
    assert hook.last_norm == pytest.approx(120000.0, rel=1e-3)
    assert weight.tolist() == pytest.approx([-0.5] * 4, rel=1e-3)


def test_doubles_are_clipped_in_double_precision(zeros, sgd):
    """Double gradients are clipped by a double norm."""
    weight, hook = zeros(2, dtype=torch.float64), GradientClipHook(max_norm=1.0)
    UpdateLoop(hook, optimizers=[sgd(weight)]).batch({weight: [0.3, 4.1]})
    norm = math.hypot(0.3, 4.1)
    assert hook.last_norm == pytest.approx(norm, rel=1e-15)
    assert weight.tolist() == pytest.approx([-0.3 / (norm + 1e-6), -4.1 / (norm + 1e-6)], rel=1e-15)


def test_no_gradients_have_norm_zero(zeros, sgd):
    """Parameters without gradients are passed over; with none at all the norm is 0 and nothing is raised."""
    used, unused, elsewhere, hook = zeros(2), zeros(2), zeros(1), GradientClipHook()
    run = UpdateLoop(hook, optimizers=[sgd(used, unused)])
    run.batch({elsewhere: 1.0})
    assert hook.last_norm == 0.0
    run.batch({used: [3.0, 4.0]})
    assert used.tolist() == pytest.approx([-0.6, -0.8])
    assert unused.tolist() == [0.0, 0.0]


@SCALERS
def test_an_optimizer_without_gradients_is_passed_over(zeros, sgd, scaled):
    """Where the loss reaches one of two optimizers, that one is clipped and steps, and the other stays."""
    for per_optimizer in (False, True):
        a, b = zeros(2), zeros(2)
        hook = GradientClipHook(per_optimizer=per_optimizer)
        run = UpdateLoop(hook, optimizers=[sgd(b), sgd(a)], scaler=scaler_of(scaled))
        run.batch({a: [3.0, 4.0]})
        assert a.tolist() == pytest.approx([-0.6, -0.8], rel=1e-6)
        assert b.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("norm_type", "norm"), [(1.0, 7.0), (2.0, 5.0), (3.0, 91.0 ** (1 / 3)), (math.inf, 4.0)])
def test_any_order_of_norm(zeros, sgd, norm_type, norm):
    """The threshold holds for the norm that was chosen."""
    weight, hook = zeros(2), GradientClipHook(max_norm=2.0, norm_type=norm_type)
    UpdateLoop(hook, optimizers=[sgd(weight)]).batch({weight: [3.0, -4.0]})
    assert hook.last_norm == pytest.approx(norm)
    assert weight.tolist() == pytest.approx([-6.0 / norm, 8.0 / norm], rel=1e-5)


def test_an_infinite_threshold_measures_only(zeros, sgd):
    """max_norm=inf reports the norm, leaves every bit of the gradients and counts no step as clipped."""
    weight, hook = zeros(2), GradientClipHook(max_norm=math.inf)
    UpdateLoop(hook, optimizers=[sgd(weight)]).batch({weight: [3.0, 4.0]})
    assert weight.tolist() == [-3.0, -4.0]
    assert (hook.last_norm, hook.measured_steps, hook.clipped_steps) == (5.0, 1, 0)


@SCALERS
def test_elements_are_cut_after_the_norm(zeros, sgd, scaled):
    """Gradients (3, 4) are first divided to (0.6, 0.8), then cut to 0.7 each way."""
    weight, hook = zeros(2), GradientClipHook(max_norm=1.0, clip_value=0.7)
    UpdateLoop(hook, optimizers=[sgd(weight)], scaler=scaler_of(scaled)).batch({weight: [-3.0, 4.0]})
    assert weight.tolist() == pytest.approx([0.6, -0.7], rel=1e-6)
    assert hook.last_norm == pytest.approx(5.0)


@SCALERS
def test_elements_are_cut_without_a_norm(zeros, sgd, scaled):
    """max_norm=inf with clip_value cuts elements of true gradients alone, and counts the step as clipped."""
    weight, hook = zeros(3), GradientClipHook(max_norm=math.inf, clip_value=2.0)
    run = UpdateLoop(hook, optimizers=[sgd(weight)], scaler=scaler_of(scaled))
    run.batch({weight: [-3.0, 4.0, 1.0]})
    assert weight.tolist() == [2.0, -2.0, -1.0]
    run.batch({weight: [1.0, 1.0, 1.0]})
    assert (hook.measured_steps, hook.clipped_steps) == (2, 1)


def test_only_cutting_elements_needs_the_gradients_themselves():
    """The hook reads .grad, and so keeps an update from being folded, only where it cuts elements."""
    assert not GradientClipHook().reads_grad
    assert not GradientClipHook(clip_value=math.inf).reads_grad
    assert GradientClipHook(clip_value=1.0).reads_grad


@SCALERS
def test_the_scale_of_this_window_is_divided_out_though_it_grows(zeros, sgd, scaled):
    """A scale that grows at every step never reaches a clipped gradient."""
    weight = zeros(2)
    run = UpdateLoop(GradientClipHook(), optimizers=[sgd(weight)], scaler=scaler_of(scaled, growth_interval=1))
    for step in range(1, 5):
        run.batch({weight: [3.0, 4.0]})
        assert weight.tolist() == pytest.approx([-0.6 * step, -0.8 * step], rel=1e-5)
    assert run.scaler is None or run.scaler.get_scale() == 1024.0 * 2**4


def test_scaled_gradients_may_have_a_norm_that_true_ones_could_not(zeros, sgd):
    """True gradients of 1e16 are clipped, though under a scale of 65536 their sum of squares overflows float32."""
    weight, hook = zeros(2), GradientClipHook(max_norm=1.0)
    run = UpdateLoop(hook, optimizers=[sgd(weight)], scaler=scaler_of(True, 65536.0))
    ctx = run.batch({weight: [3e16, 4e16]})
    assert not ctx.step_skipped
    assert hook.last_norm == pytest.approx(5e16)
    assert weight.tolist() == pytest.approx([-0.6, -0.8], rel=1e-5)
    assert run.scaler.get_scale() == 65536.0


def test_a_reader_between_two_clippings_leaves_no_stale_norm(zeros, sgd):
    """The second of two clippings measures what the first left, also when a reader had it divided out in between."""
    for readers in ([], [Monitor()]):
        weight = zeros(2)
        first, second = GradientClipHook(max_norm=2.0), GradientClipHook(max_norm=1.0).labelled("again")
        run = UpdateLoop(first, *readers, second, optimizers=[sgd(weight)])
        run.update = run.update.with_priority({"again": 60})
        run.batch({weight: [3.0, 4.0]})
        assert (first.last_norm, second.last_norm) == (pytest.approx(5.0), pytest.approx(2.0, rel=1e-5))
        assert weight.tolist() == pytest.approx([-0.6, -0.8], rel=1e-5)


def test_clipping_comes_after_the_unscale_and_before_everybody_else():
    """The priority is that of clipping, whatever order the hooks are given in."""
    hook, monitor = GradientClipHook(), Monitor()
    assert hook.priority == UpdatePriority.CLIP == 30
    assert list(TrainingUpdateOrchestrator(monitor, hook).iter_hooks()) == [hook, monitor]


numbers = st.floats(min_value=-1e6, max_value=1e6, width=32)


@settings(max_examples=60, deadline=None)
@given(
    gradient=st.lists(numbers, min_size=1, max_size=8),
    max_norm=st.floats(min_value=1.0, max_value=1e4),
    norm_type=st.sampled_from([1.0, 2.0, math.inf]),
)
def test_clipping_twice_is_clipping_once(gradient, max_norm, norm_type):
    """A second clipping with the same threshold changes nothing, and the threshold holds."""

    def step(*hooks):
        weight = nn.Parameter(torch.zeros(len(gradient)))
        update = TrainingUpdateOrchestrator(*hooks)
        with TrainContext(optimizers=[torch.optim.SGD([weight], lr=1.0)]) as ctx:
            update(ctx, TrainingStage.BEFORE_BATCH)
            ctx.loss = weight @ torch.tensor(gradient)
            for stage in ("DO_BACKWARD", "DO_OPTIMIZER_STEP", "AFTER_OPTIMIZER_STEP"):
                update(ctx, TrainingStage[stage])
        return weight.detach().double()

    def clip(label):
        return GradientClipHook(max_norm=max_norm, norm_type=norm_type).labelled(label)

    once, twice = step(clip("a")), step(clip("a"), clip("b"))
    assert torch.linalg.vector_norm(once, norm_type) <= max_norm * (1 + 1e-6)
    torch.testing.assert_close(twice, once, rtol=1.5e-6, atol=1e-40)  # the epsilon, rounding, subnormals
