"""MixedPrecisionHook: autocast over forward and loss, nothing else, and a scaled loss for fp16 alone."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.hooks import ProvidesInferenceContext, TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator, UpdatePriority
from nvalchemi_hooks_loss_scaling import LossScaler, LossScalingHook, MixedPrecisionHook

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SGD = torch.optim.SGD


def autocast_dtype():
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


class Spy(torch.autograd.Function):
    """Note autocast's state in the backward pass."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(("backward", autocast_dtype(), grad.dtype))
        return grad, None


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1)


@pytest.mark.parametrize("precision", AUTOCAST)
def test_it_declares_what_it_is(precision):
    """Priority 20, the family of loss scaling, and that it provides the precision of validation."""
    hook = MixedPrecisionHook(precision)
    assert (hook.name, hook.exclusive_family) == ("mixed_precision", "loss_scaling")
    assert hook.priority == UpdatePriority.SCALE
    assert hook.reads_grad is False
    assert isinstance(hook, ProvidesInferenceContext)


@pytest.mark.parametrize(("precision", "dtype"), AUTOCAST.items())
def test_autocast_spans_forward_and_loss_but_not_backward(linear, precision, dtype):
    """The forward runs in the precision, the loss is under autocast still, and the backward pass is outside."""
    seen, data = [], torch.ones(4, 3)
    update = TrainingUpdateOrchestrator(MixedPrecisionHook(precision))
    with TrainContext(models={"main": linear}, optimizers=[SGD(linear.parameters(), lr=0.1)]) as ctx:
        update(ctx, TrainingStage.BEFORE_BATCH)
        prediction = linear(data)
        seen.append(("forward", autocast_dtype(), prediction.dtype))
        ctx.loss = Spy.apply(prediction, seen).float().square().mean()
        seen.append(("loss", autocast_dtype(), ctx.loss.dtype))
        update(ctx, TrainingStage.DO_BACKWARD)
        seen.append(("after", autocast_dtype(), linear.weight.grad.dtype))
        update(ctx, TrainingStage.DO_OPTIMIZER_STEP)
        update(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
    low = dtype or torch.float32
    assert seen == [
        ("forward", dtype, low),
        ("loss", dtype, torch.float32),
        ("backward", None, low),
        ("after", None, torch.float32),
    ]


def test_fp32_does_nothing(run_batch, linear):
    """No scaler, no autocast, the very loss object, no scaler in the state: as if the hook were not there."""
    hook, given = MixedPrecisionHook("fp32"), torch.ones((), requires_grad=True)
    ctx = TrainContext(models={"main": linear.double()}, grad_scaler=(own := torch.amp.GradScaler("cpu")))
    hook(ctx, TrainingStage.SETUP)
    assert hook.before_batch(ctx, will_skip=False) is True
    assert autocast_dtype() is None
    assert hook.transform_loss(ctx, given) is given
    assert ctx.grad_scaler is own
    assert hook.state_dict() == {"precision": "fp32"}


def test_bf16_is_autocast_alone(linear):
    """The loss given to backward is the raw loss, gradients are true at once, and the checkpoint holds no scaler."""
    hook, data = MixedPrecisionHook("bf16"), torch.ones(4, 3)
    update = TrainingUpdateOrchestrator(hook)
    with TrainContext(models={"main": linear}, optimizers=[SGD(linear.parameters(), lr=0.1)]) as ctx:
        update(ctx, TrainingStage.BEFORE_BATCH)
        assert ctx.grad_scaler is None
        loss = linear(data).float().mean()
        assert hook.transform_loss(ctx, loss) is loss
        ctx.loss = loss
        update(ctx, TrainingStage.DO_BACKWARD)
        torch.testing.assert_close(linear.weight.grad, torch.ones(1, 3))
    assert hook.scaler is None
    assert hook.state_dict() == {"precision": "bf16"}


def test_fp16_scales_and_publishes_as_the_scaling_hook_does(run_batch, linear):
    """Gradients carry the scale, the step is that of true gradients, and an inf backs off once."""
    hook, data = MixedPrecisionHook("fp16", init_scale=1024.0), torch.ones(4, 3)
    update, optimizer = TrainingUpdateOrchestrator(hook), SGD(linear.parameters(), lr=1.0)
    before = linear.weight.detach().clone()
    ctx = run_batch(update, lambda: linear(data).float().mean(), [optimizer], models={"main": linear})
    assert isinstance(hook.scaler, LossScaler)
    assert ctx.grad_scaler is hook.scaler
    torch.testing.assert_close(linear.weight.detach(), before - 1.0)
    run_batch(update, lambda: linear(data).float().mean() * torch.inf, [optimizer], models={"main": linear})
    torch.testing.assert_close(linear.weight.detach(), before - 1.0)
    assert hook.scaler.get_scale() == 512.0


def test_fp16_takes_every_scaling_option():
    """The options of LossScalingHook mean the same here, a static scale included."""
    options = {
        "init_scale": 8.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3, "min_scale": 2.0,
        "max_scale": 64.0,
    }  # fmt: skip
    assert MixedPrecisionHook("fp16", **options).scaler.settings == LossScalingHook(**options).scaler.settings
    assert MixedPrecisionHook("fp16", scale=128.0).scaler.settings.dynamic is False


def test_small_gradients_survive_fp16_only_with_a_scale(run_batch):
    """A gradient of 1e-9 is 0 in fp16; scaled by 65536 it arrives, to 0.1 %."""
    data = torch.full((1, 1), 1.0)
    moved = []
    for scale in (1.0, 65536.0):
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        update = TrainingUpdateOrchestrator(MixedPrecisionHook("fp16", scale=scale))
        optimizer = SGD(model.parameters(), lr=1e9)
        run_batch(update, lambda m=model: m(data).float().sum() * 1e-9, [optimizer], models={"main": model})
        moved.append(model.weight.item())
    assert moved[0] == 0.0
    assert moved[1] == pytest.approx(-1.0, rel=1e-3)


@pytest.mark.parametrize(("precision", "dtype"), AUTOCAST.items())
def test_inference_runs_in_the_same_precision(linear, precision, dtype):
    """The context for validation casts as the batch does, is fresh each time, and leaves nothing open."""
    hook = MixedPrecisionHook(precision)
    for _ in range(2):
        with hook.inference_context(torch.device("cpu")), torch.no_grad():
            assert linear(torch.ones(1, 3)).dtype == (dtype or torch.float32)
        assert autocast_dtype() is None


class Raise(TrainingUpdateHook):
    """Break at a chosen place, after the precision hook has acted."""

    priority = 40
    reads_grad = False

    def __init__(self, where):
        self.where = where

    def before_batch(self, ctx, *, will_skip):
        return self._maybe("before_batch", True)

    def transform_loss(self, ctx, loss):
        return self._maybe("transform_loss", loss)

    def before_optimizer_step(self, ctx, *, will_skip):
        return self._maybe("before_optimizer_step", True)

    def _maybe(self, here, value):
        if here == self.where:
            raise RuntimeError(here)
        return value


class RaiseBefore(Raise):
    """Break before the precision hook has acted."""

    priority = 15


@pytest.mark.parametrize("breaker", [Raise, RaiseBefore])
@pytest.mark.parametrize("where", ["before_batch", "forward", "loss", "transform_loss", "before_optimizer_step"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_is_closed_whatever_raises(run_batch, linear, precision, where, breaker):
    """After an exception anywhere in the batch autocast is off, and a batch without the hook runs in fp32."""

    def loss():
        prediction = linear(torch.ones(1, 3))
        if where in ("forward", "loss"):
            raise RuntimeError(where)
        return prediction.float().sum()

    update = TrainingUpdateOrchestrator(MixedPrecisionHook(precision), breaker(where))
    optimizer = SGD(linear.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=where):
        run_batch(update, loss, [optimizer], models={"main": linear})
    assert autocast_dtype() is None
    assert linear(torch.ones(1, 3)).dtype == torch.float32


def test_a_loop_that_never_closes_its_context_does_not_pile_up_autocast(linear):
    """Batches that broke off in a loop without `with` leave one autocast at most, and closing the hook ends that."""
    hook = MixedPrecisionHook("bf16")
    for _ in range(3):
        hook(TrainContext(models={"main": linear}), TrainingStage.BEFORE_BATCH)
    assert autocast_dtype() == torch.bfloat16
    hook.close()
    assert autocast_dtype() is None
    hook.close()


def test_a_second_context_that_fails_to_open_leaves_none_open(linear):
    """When a later hook's context fails to enter, autocast that was opened before it is closed."""

    class Broken(TrainingUpdateHook):
        def before_batch(self, ctx, *, will_skip):
            ctx.enter_batch_context(torch.autocast("no such device"))
            return True

    update = TrainingUpdateOrchestrator(MixedPrecisionHook("bf16"), Broken())
    with pytest.raises(RuntimeError), TrainContext(models={"main": linear}) as ctx:  # noqa: PT012 - it is the block
        update(ctx, TrainingStage.BEFORE_BATCH)
    assert autocast_dtype() is None


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_weights_are_cast_anew_in_every_batch(run_batch, linear, precision):
    """The second batch sees the weights of the first step, not a cast that was cached before it."""
    scaling = {"init_scale": 1024.0} if precision == "fp16" else {}
    update, data, outputs = TrainingUpdateOrchestrator(MixedPrecisionHook(precision, **scaling)), torch.ones(1, 3), []

    def loss():
        outputs.append(linear(data))
        return outputs[-1].float().sum()

    for _ in range(2):
        run_batch(update, loss, [SGD(linear.parameters(), lr=1.0)], models={"main": linear})
    assert (outputs[0] - outputs[1]).item() == pytest.approx(4.0, rel=0.02)  # three weights and a bias moved by 1 each


class Potential(torch.nn.Module):
    """Energy of positions, and forces by autograd: the loss differentiates twice."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.SiLU(), torch.nn.Linear(16, 1))

    def forward(self, positions):
        positions = positions.clone().requires_grad_()
        energy = self.net(positions).float().sum()
        [gradient] = torch.autograd.grad(energy, positions, create_graph=True)
        return energy, -gradient


@pytest.mark.parametrize("precision", AUTOCAST)
def test_models_that_differentiate_in_their_forward_train(run_batch, precision):
    """Forces by autograd train in every precision: the loss falls to a tenth, and follows fp32 within 5 % at first."""

    def losses(name, steps):
        torch.manual_seed(0)
        model, positions = Potential(), torch.randn(32, 3)
        update = TrainingUpdateOrchestrator(MixedPrecisionHook(name))
        optimizer = torch.optim.Adam(model.parameters(), 0.02)
        seen = []
        for _ in range(steps):

            def loss():
                _, forces = model(positions)
                return (forces + positions).square().mean()

            seen.append(run_batch(update, loss, [optimizer], models={"main": model}).loss.item())
        return seen

    trained = losses(precision, 120)
    assert trained[-1] < 0.1 * trained[0]
    assert trained[:5] == pytest.approx(losses("fp32", 5), rel=0.05)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("fp61", "Did you mean 'fp16'?"),
        ("BF16", "Did you mean 'bf16'?"),
        ("bfloat16", "Did you mean 'bf16'?"),
        (torch.float16, "Did you mean 'fp16'?"),
        ("half", "Did you mean 'fp16'?"),
        (16, "give one of 'fp32', 'bf16', 'fp16'."),
        (None, "precision is None"),
    ],
)
def test_an_unknown_precision_is_refused(given, hint):
    """The error names the value, all that are known, and the closest."""
    with pytest.raises(ValueError, match=r"precision is .*; give one of 'fp32', 'bf16', 'fp16'\.") as error:
        MixedPrecisionHook(given)
    assert hint in str(error.value)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_scaling_options_without_fp16_are_refused(precision):
    """A scale that nothing would use is a contradiction, named at construction."""
    with pytest.raises(ValueError, match=f"init_scale is given, but precision '{precision}' does not scale"):
        MixedPrecisionHook(precision, init_scale=8.0)


def with_parameters(*dtypes):
    return torch.nn.ParameterDict({f"w{i}": torch.nn.Parameter(torch.zeros(1, dtype=d)) for i, d in enumerate(dtypes)})


@pytest.mark.parametrize(
    ("precision", "dtypes", "message"),
    [
        ("fp16", [torch.float32, torch.float16], "scales the loss, but parameter 'w1' of model 'net' is in fp16"),
        ("fp16", [torch.float32, torch.bfloat16], r"trains in torch\.float16, but parameter 'w1' of model 'net'"),
        ("bf16", [torch.float16], r"trains in torch\.bfloat16, but parameter 'w0' of model 'net' is in torch\.float16"),
        ("bf16", [torch.float64, torch.float64], "every trained parameter, from parameter 'w0' of model 'net' on"),
        ("fp16", [torch.float64], "float64, which autocast leaves as it is"),
    ],
)
def test_parameters_that_contradict_the_precision_are_refused_at_setup(precision, dtypes, message):
    """The first parameter in the wrong dtype is named with its model before batch 0."""
    update = TrainingUpdateOrchestrator(MixedPrecisionHook(precision))
    with pytest.raises(ValueError, match=message):
        update(TrainContext(models={"net": with_parameters(*dtypes)}), TrainingStage.SETUP)


@pytest.mark.parametrize(
    ("precision", "dtypes"),
    [
        ("fp16", [torch.float32, torch.float64]),
        ("bf16", [torch.float32, torch.float64]),
        ("bf16", [torch.bfloat16]),
        ("fp32", [torch.float16, torch.float64]),
        ("fp16", []),
    ],
)
def test_what_does_not_contradict_is_let_through(precision, dtypes):
    """A few double parameters beside single ones, bf16 weights with bf16, and anything at all with fp32."""
    update = TrainingUpdateOrchestrator(MixedPrecisionHook(precision))
    update(TrainContext(models={"net": with_parameters(*dtypes)}), TrainingStage.SETUP)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [TrainingStage.SETUP, TrainingStage.BEFORE_BATCH])
def test_the_users_own_scaler_beside_it_is_refused(precision, stage):
    """A scaler in the context contradicts bf16, which needs none, and fp16, which has one: both are named."""
    ctx = TrainContext(grad_scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match=r"MixedPrecisionHook .*ctx\.grad_scaler is a GradScaler"):
        TrainingUpdateOrchestrator(MixedPrecisionHook(precision))(ctx, stage)
    assert autocast_dtype() is None
