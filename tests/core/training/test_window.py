"""The arithmetic of one window: norms, divisors, flags, and what ``.grad`` holds meanwhile."""

from __future__ import annotations

import math

import pytest
import torch

from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator
from nvalchemi.training.hooks.window import UpdateWindow

INF, NAN = float("inf"), float("nan")


def window_over(*groups, scaler=None, make=torch.optim.SGD):
    """Return a window over optimizers whose parameters have these gradients."""
    optimizers = []
    for group in groups:
        parameters = []
        for gradient in group:
            parameter = torch.nn.Parameter(torch.zeros_like(gradient))
            parameter.grad = gradient.clone()
            parameters.append(parameter)
        optimizers.append(make(parameters, lr=1.0))
    return UpdateWindow(optimizers, scaler)


def t(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("kind", "norm"), [(2.0, 13.0), (1.0, 19.0), (INF, 12.0), (3.0, (27 + 64 + 1728) ** (1 / 3))], ids=str
)
def test_norms_of_any_order(kind, norm):
    """``norm`` gives the norm of any order over the gradients of all optimizers."""
    window = window_over([t(3.0), t(-4.0)], [t(12.0)])
    assert window.norm(kind).item() == pytest.approx(norm, rel=1e-6)


def test_the_norm_of_one_optimizer():
    """``norm(optimizer=i)`` is that of one optimizer alone."""
    window = window_over([t(3.0), t(4.0)], [t(12.0)])
    assert [window.norm(optimizer=0).item(), window.norm(optimizer=1).item(), window.norm().item()] == [5.0, 12.0, 13.0]


def test_a_norm_is_a_scalar_on_the_device():
    """A norm is 0-dim, float32, and float64 where gradients are."""
    assert window_over([t(3.0)]).norm().shape == ()
    assert window_over([t(3.0)]).norm().dtype == torch.float32
    assert window_over([t(3.0, dtype=torch.bfloat16)]).norm().dtype == torch.float32
    assert window_over([t(3.0, dtype=torch.float64)]).norm().dtype == torch.float64


def test_no_gradients_have_norm_zero():
    """Without gradients the norm is 0.0, the flag 0.0, and dividing does nothing."""
    parameter = torch.nn.Parameter(torch.ones(3))
    window = UpdateWindow([torch.optim.SGD([parameter], lr=1.0)])
    window.divide(torch.tensor(2.0))
    window.materialise()
    assert (window.norm().item(), window.norm(INF).item(), window.nonfinite().item()) == (0.0, 0.0, 0.0)
    assert (window.grad_norm.item(), window.tensors()) == (0.0, [])


def test_mixed_dtypes_have_one_norm():
    """Gradients of several dtypes have one norm, accumulated in float32."""
    window = window_over([t(3.0, dtype=torch.float16), t(4.0)])
    assert window.norm().item() == pytest.approx(5.0)


def test_half_precision_is_accumulated_in_float32():
    """Many small gradients of half precision do not get lost in their sum."""
    window = window_over([torch.full((10_000,), 0.01, dtype=torch.float16)])
    assert window.norm().item() == pytest.approx(1.0, rel=1e-3)
    assert window.norm(1.0).item() == pytest.approx(100.0, rel=1e-3)


def test_pending_divisors_count():
    """``norm`` takes everything into account that hooks have asked for so far, before anything is divided."""
    window = window_over([t(3.0)], [t(4.0)])
    window.divide(torch.tensor(2.0))
    assert window.norm().item() == 2.5
    window.divide(torch.tensor(4.0), optimizer=1)
    assert [window.norm(optimizer=0).item(), window.norm(optimizer=1).item()] == [1.5, 0.5]
    assert [tensor.item() for tensor in window.tensors()] == [3.0, 4.0]


def test_materialise_divides_once():
    """``materialise`` divides what is pending out of ``.grad``, and doing it again changes nothing."""
    window = window_over([t(3.0)], [t(4.0)])
    window.divide(torch.tensor(2.0))
    window.divide(torch.tensor(2.0))
    for _ in range(2):
        window.materialise()
        assert [tensor.item() for tensor in window.tensors()] == [0.75, 1.0]
        assert window.norm().item() == 1.25


def test_tensors_share_memory_with_grad():
    """``tensors`` are the gradients themselves: what is done to them is done to ``.grad``."""
    window = window_over([t(3.0, 4.0)])
    (tensor,) = window.tensors()
    tensor.mul_(2)
    assert window.optimizers[0].param_groups[0]["params"][0].grad.tolist() == [6.0, 8.0]


def test_complex_gradients_are_pairs_of_reals():
    """A complex gradient counts with its absolute value, and is divided as a whole."""
    window = window_over([torch.tensor([3.0 + 4.0j])])
    assert (window.norm().item(), window.nonfinite().item()) == (5.0, 0.0)
    window.divide(torch.tensor(2.0))
    window.materialise()
    assert window.optimizers[0].param_groups[0]["params"][0].grad.tolist() == [1.5 + 2.0j]


def test_sparse_gradients_count_coalesced():
    """A sparse gradient counts with its summed values."""
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1, 1, 2])).sum().backward()
    window = UpdateWindow([torch.optim.SGD(embedding.parameters(), lr=1.0)])
    assert window.norm().item() == pytest.approx(math.sqrt(20))
    window.divide(window.norm())
    window.materialise()
    assert embedding.weight.grad.coalesce().values().norm().item() == pytest.approx(1.0)


# Exactness.


@pytest.mark.parametrize("value", [1e25, 3e38, 1e19, 1.0, 1e-19, 1e-25, 1e-38])
@pytest.mark.parametrize("elements", [1, 4])
def test_a_norm_has_the_whole_range_of_float32(value, elements):
    """The sum of squares costs no range: gradients that are finite and not zero have their true norm."""
    gradient = torch.full((elements,), value)
    window = window_over([gradient])
    assert window.nonfinite().item() == 0.0
    expected = gradient.double().norm()
    if expected < torch.finfo(torch.float32).max:
        assert window.norm().item() == pytest.approx(expected.item(), rel=1e-5, abs=0.0)


def test_a_norm_over_several_optimizers_has_the_whole_range_too():
    """The norms of several optimizers are combined without overflow or underflow."""
    for value in (3e25, 3e-25):
        window = window_over([t(value)], [t(value / 3 * 4)])
        assert window.norm().item() == pytest.approx(value / 3 * 5, rel=1e-5, abs=0.0)
        assert window.nonfinite().item() == 0.0


@pytest.mark.parametrize("place", [0, 1, 5, -1])
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("fill", [0.0, 1.0, 1e30])
def test_every_inf_and_nan_is_found(place, bad, fill):
    """``nonfinite`` is exactly 1.0 when any element of any gradient is inf or nan: float32, 0-dim."""
    gradient = torch.full((37,), fill)
    gradient[place] = bad
    flag = window_over([t(1.0)], [t(1.0), gradient]).nonfinite()
    assert (flag.item(), flag.dtype, flag.shape) == (1.0, torch.float32, ())


@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.float16, 65504.0), (torch.bfloat16, 3e38), (torch.float32, 3e38)]
)
def test_large_finite_gradients_are_finite(dtype, largest):
    """``nonfinite`` is exactly 0.0 for gradients near the end of their range, however many."""
    assert window_over([torch.full((64,), largest, dtype=dtype)]).nonfinite().item() == 0.0


def test_large_finite_gradients_of_double_precision_are_finite():
    """Gradients in float64 are finite also where their sum of squares overflows float64."""
    window = window_over([torch.full((4,), 1e200, dtype=torch.float64)])
    assert window.nonfinite().item() == 0.0
    assert window.norm().item() == pytest.approx(2e200)


def test_double_precision_is_exact():
    """Gradients in float64 are measured and divided in float64."""
    gradient = torch.tensor([1 / 3, 2 / 7, 5 / 11], dtype=torch.float64)
    window = window_over([gradient])
    divisor = torch.tensor(1.7, dtype=torch.float64)
    assert window.norm().item() == gradient.norm().item()
    window.divide(divisor)
    window.materialise()
    assert torch.equal(window.tensors()[0], gradient / divisor)


# The loss scale.


def test_the_loss_scale_is_pending_too(folding_scaler):
    """Under a loss scale norms are those of true gradients, while ``.grad`` still holds the scaled ones."""
    window = window_over([t(24.0, 32.0)], scaler=folding_scaler(8.0))
    assert (window.norm().item(), window.grad_norm.item(), window.norm(INF).item()) == (5.0, 5.0, 4.0)
    assert window.tensors()[0].tolist() == [24.0, 32.0]
    window.materialise()
    assert window.tensors()[0].tolist() == [3.0, 4.0]
    assert (window.norm().item(), window.grad_norm.item()) == (5.0, 5.0)


def test_the_loss_scale_costs_no_range(folding_scaler):
    """The norm of true gradients is right also where the scaled ones are large."""
    window = window_over([torch.full((16,), 1e30)], scaler=folding_scaler(2.0**16))
    assert window.norm().item() == pytest.approx(4e30 / 2**16, rel=1e-6)
    assert window.nonfinite().item() == 0.0


# What a hook sees through its context.


class Look(TrainingUpdateHook):
    """Keeps what the context tells it before the step."""

    reads_grad = False
    defers_veto = True

    def __init__(self, label="look", priority=50):
        self.labelled(label)
        self.priority = priority

    def before_optimizer_step(self, ctx, *, will_skip):
        self.grad_norm = ctx.grad_norm
        self.gradients = {name: gradient.tolist() for name, gradient in ctx.gradients.items()}
        self.norm = ctx.window.norm()
        return True


@pytest.mark.parametrize("kind", ["counting_scaler", "public_scaler", "folding_scaler"])
def test_gradients_and_grad_norm_are_true(make_loop, scale, request, kind):
    """``ctx.gradients`` gives true gradients by parameter name, ``ctx.grad_norm`` their global norm."""
    look = Look()
    make_loop(scale(request.getfixturevalue(kind)()), look, weights=(1.0, 1.0, 1.0)).batch(3.0, 4.0, None)
    assert look.gradients == {"p0": 3.0, "p1": 4.0}
    assert look.grad_norm.item() == 5.0


def test_names_carry_the_model_where_there_are_several():
    """With several models the name of the model stands in front; wrappers leave no trace in names."""
    main, critic = torch.nn.Linear(1, 1), torch.nn.DataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD([*main.parameters(), *critic.parameters()], lr=1.0)
    ctx = TrainContext(models={"main": main, "critic": critic}, optimizers=[optimizer])
    TrainingUpdateOrchestrator()(ctx, TrainingStage.BEFORE_BATCH)
    (main.weight.sum() + critic.module.bias.sum()).backward()
    assert set(ctx.gradients) == {"main.weight", "critic.bias"}


def test_grad_norm_is_that_before_clipping(make_loop, divide):
    """``ctx.grad_norm`` is the norm before clipping, ``ctx.window.norm`` the one after it."""
    look = Look()
    make_loop(divide(3.0), look, weights=(1.0, 1.0)).batch(3.0, 4.0)
    assert look.grad_norm.item() == 5.0
    assert look.norm.item() == pytest.approx(5 / 3)


@pytest.mark.parametrize("by", [1.1, 3.7, 7.3, 1000.1])
def test_grad_norm_is_computed_once_whoever_asks(make_loop, divide, read, by):
    """``ctx.grad_norm`` is computed once a window: before and after clipping everybody gets the very same number."""
    looks = [Look(str(priority), priority) for priority in (5, 35, 45, 55)]
    loop = make_loop(divide(by), read(priority=50), *looks, weights=(torch.ones(100),))
    for seed in range(5):
        ctx = loop.batch(torch.randn(100, generator=torch.Generator().manual_seed(seed)))
        assert len({look.grad_norm.item() for look in looks} | {ctx.grad_norm.item()}) == 1


def test_grad_norm_survives_a_hook_that_clips_by_itself(make_loop):
    """Who asks for ``ctx.grad_norm`` after another hook clipped ``.grad`` gets the number asked for before."""

    class Clip(TrainingUpdateHook):
        def before_optimizer_step(self, ctx, *, will_skip):
            torch.nn.utils.clip_grad_norm_(ctx.models["main"].parameters(), 1.0)
            return True

    first, last = Look("first", 10), Look("last", 60)
    loop = make_loop(first, Clip(), last, weights=(1.0, 1.0))
    ctx = loop.batch(3.0, 4.0)
    assert first.grad_norm.item() == last.grad_norm.item() == ctx.grad_norm.item() == 5.0
    assert last.norm.item() == pytest.approx(1.0)  # later norms respect what was done


@pytest.mark.parametrize("power", ["gradients", "grad_norm", "veto_flag"])
def test_powers_need_an_orchestrator(power):
    """Before an orchestrator saw the batch the powers of the context say what to call first."""
    with pytest.raises(RuntimeError, match=f"ctx.{power} .*BEFORE_BATCH"):
        getattr(TrainContext(), power)
