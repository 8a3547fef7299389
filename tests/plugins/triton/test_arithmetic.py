"""The programs, run in Triton's interpreter, against the equations and against torch."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import TensorHandle

from nvalchemi_hooks_triton.kernels import Batch, Rule, Tables, onepass, reference, update_

RULE_BUT_LR = ((0.9, 0.999), 1e-8, 0.1)
RULE = Rule(1e-2, *RULE_BUT_LR)
ROUNDING = 2.0**-24  # half a unit in the last place of a float32 near 1
SHAPES = [(), (0,), (1,), (5, 7), (512,), (4096,), (2, 2049)]  # empty, tails, whole blocks, more than one chunk


def columns(batch: Batch) -> list[list[torch.Tensor]]:
    """Return all that an update may change."""
    written = (batch.weights, batch.firsts, batch.seconds, batch.steps, batch.averages, batch.rounded)
    return [column for column in written if column is not None]


def bits(batch: Batch) -> list[torch.Tensor]:
    """Return a copy of all that an update may change, as bytes."""
    return [one.clone().reshape(-1).view(torch.uint8) for column in columns(batch) for one in column]


def step(batch: Batch, rule: Rule = RULE, *, divisor: float | None = None, veto: float | None = None) -> None:
    """Update once, with new tables."""
    operands = {"divisor": divisor, "veto": veto}
    update_(
        batch,
        rule,
        Tables(torch.device("cpu")),
        **{k: None if v is None else torch.tensor(v) for k, v in operands.items()},
    )


def elements(batch: Batch) -> list[tuple[reference.Element, float]]:
    """Return every weight with what belongs to it, and its gradient."""
    assert batch.averages is not None
    flat = []
    for row in zip(
        batch.weights, batch.firsts, batch.seconds, batch.averages, batch.gradients, batch.steps, strict=True
    ):
        *numbers, count = (one.double().flatten().tolist() for one in row)
        for weight, first, second, average, gradient in zip(*numbers, strict=True):
            flat.append((reference.Element(weight, first, second, average, count[0]), gradient))
    return flat


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 700), min_size=1, max_size=4),
    lr=st.sampled_from([1e-3, 0.5]),
    betas=st.sampled_from([(0.9, 0.999), (0.0, 0.95), (0.5, 0.5)]),
    weight_decay=st.sampled_from([0.0, 0.3]),
    decoupled=st.booleans(),
    maximize=st.booleans(),
    divisor=st.sampled_from([1.0, 3.0, 65536.0]),
    share=st.sampled_from([0.001, 0.5, 0.9, 1.0]),
    steps=st.sampled_from([0, 1, 100_000]),
    offset=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_a_step_is_the_equation(make_batch, sizes, divisor, share, steps, offset, seed, **options):
    """Each number differs from the equations by a few roundings of what was added up to it."""
    rule = Rule(eps=1e-8, **options)
    batch = make_batch([(size,) for size in sizes], share=share, steps=steps, offset=offset, seed=seed)
    for moment in (*batch.firsts, *batch.seconds):
        moment.mul_(steps > 0)  # before the first step there is nothing in them
    before = elements(batch)
    step(batch, rule, divisor=divisor)
    after = [element for element, _ in elements(batch)]
    given_ = {"lr": rule.lr, "betas": rule.betas, "eps": rule.eps, "weight_decay": rule.weight_decay}
    for (old, gradient), new in zip(before, after, strict=True):
        want = reference.update(
            old, gradient, **given_, decoupled=rule.decoupled, maximize=rule.maximize, divisor=divisor, share=share
        )
        grad = abs(gradient) / divisor + abs(rule.weight_decay * old.weight)
        first = rule.betas[0] * abs(old.first) + (1 - rule.betas[0]) * grad
        second = rule.betas[1] * old.second + (1 - rule.betas[1]) * grad**2
        unbiased = first / (1 - rule.betas[0] ** want.step), want.second / (1 - rule.betas[1] ** want.step)
        weight = abs(old.weight) + rule.lr * unbiased[0] / (math.sqrt(unbiased[1]) + rule.eps)
        allowed = reference.Element(weight, first, second, abs(old.average) + weight, 0.0)
        for value, exact, scale in zip(new, want, allowed, strict=True):
            assert abs(value - exact) <= 10 * ROUNDING * scale


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize("maximize", [False, True])
def test_a_run_is_that_of_torch(kind, maximize):
    """Over steps, a veto among them, weights, state and average are those of the fused optimizer and a lerp after it.

    Both round a handful of times to float32, but not at the same places (the bias corrections enter elsewhere): so they
    agree to some 1e-6 of what is added up, not bit for bit.
    """
    torch.manual_seed(0)
    theirs = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    mine = copy.deepcopy(theirs)
    followers = [[weight.detach().clone() for weight in weights] for weights in (theirs, mine)]
    settings_ = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1, "maximize": maximize, "fused": True}
    stock, state = (kind(weights, **settings_) for weights in (theirs, mine))
    tables = Tables(torch.device("cpu"))
    for turn, veto in enumerate([0.0, 0.0, 1.0, 0.0]):
        gradients = [torch.randn(shape) * 30 for shape in SHAPES]
        divisor, flag = torch.tensor(7.0), torch.tensor(veto)
        for optimizer in (stock, state) if turn == 0 else (stock,):  # torch makes the state of both in the first step
            for weight, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
                weight.grad = gradient.clone()
            optimizer.grad_scale, optimizer.found_inf = divisor, flag
            optimizer.step()
        if turn > 0:
            states = [state.state[weight] for weight in mine]
            firsts, seconds, counters = ([one[key] for one in states] for key in ("exp_avg", "exp_avg_sq", "step"))
            batch = Batch(mine, gradients, firsts, seconds, counters, followers[1], None, 0.1)
            rule = Rule(1e-2, (0.9, 0.99), 1e-8, 0.1, decoupled=kind is torch.optim.AdamW, maximize=maximize)
            update_(batch, rule, tables, divisor=divisor, veto=flag)
            if not veto:
                torch._foreach_lerp_(followers[0], [weight.detach() for weight in theirs], 0.1)
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(followers[1], followers[0], rtol=1e-6, atol=1e-6)
    for one, other in zip(state.state.values(), stock.state.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
        assert one["step"] == 3


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("gradient", [math.inf, math.nan, 1.0])
def test_a_veto_leaves_every_bit(make_batch, monkeypatch, capturing, gradient):
    """Under a veto nothing changes, whatever the gradients hold: weights, moments, step counters, averages."""
    monkeypatch.setattr(onepass, "_capturing", lambda device: capturing)
    batch = make_batch(SHAPES, rounds=True)
    for tensor in batch.gradients:
        tensor.fill_(gradient)
    before = bits(batch)
    step(batch, veto=1.0)
    assert all(map(torch.equal, bits(batch), before))


@pytest.mark.parametrize("veto", [None, 0.0])
def test_without_a_veto_everything_moves(make_batch, veto):
    """A flag of 0 is no veto: every column changes, and the counters by exactly one."""
    batch = make_batch([(5, 7), (600,)], rounds=True)
    before = bits(batch)
    step(batch, veto=veto)
    assert not any(map(torch.equal, bits(batch), before))
    assert batch.steps == [4.0, 4.0]


def test_gradients_are_only_read(make_batch):
    """What is divided out stays in the gradients."""
    batch = make_batch(SHAPES)
    before = copy.deepcopy(batch.gradients)
    step(batch, divisor=3.0)
    assert all(map(torch.equal, batch.gradients, before))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rounds", [False, True])
def test_one_launch_or_many_is_the_same(make_batch, monkeypatch, dtype, rounds):
    """One launch for each tensor, as under the capture of a CUDA graph, gives the bits of one launch for all."""
    together, apart = (make_batch(SHAPES, dtype, rounds=rounds) for _ in range(2))
    step(together, divisor=3.0, veto=0.0)
    monkeypatch.setattr(onepass, "_capturing", lambda device: True)
    step(apart, divisor=3.0, veto=0.0)
    assert all(map(torch.equal, bits(together), bits(apart)))


@pytest.fixture
def promises(monkeypatch):
    """Every address that the compiler is told is a multiple of 16."""
    found = []
    monkeypatch.setattr(TensorHandle, "set_attr", lambda handle, *promise: found.append((handle.data.item(), *promise)))
    return found


@pytest.mark.parametrize("moved", ["weights", "gradients", "firsts", "seconds", "averages", "rounded"])
def test_a_gpu_is_promised_no_alignment_that_is_not_there(make_batch, promises, moved):
    """One column that begins somewhere in memory is enough: a GPU would stop at a wide access to it."""
    batch = make_batch([(1100,)], torch.float16, rounds=True)
    step(batch)
    assert len(promises) == 6  # one for each column, in the one whole block
    assert all(address % value[0] == 0 for address, _, value in promises)
    promises.clear()
    (tensor,) = getattr(batch, moved)
    step(replace(batch, **{moved: [torch.empty(1103, dtype=tensor.dtype)[3:].copy_(tensor)]}))
    assert promises == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("offset", [1, 2, 3, 5])
def test_alignment_does_not_matter(make_batch, dtype, offset):
    """Tensors that begin anywhere in memory get the bits that aligned ones get."""
    aligned, shifted = make_batch([(1100,)], dtype, rounds=True), make_batch([(1100,)], dtype, rounds=True)
    moved = {}
    for name in ("weights", "gradients", "firsts", "seconds", "averages", "rounded"):
        (tensor,) = getattr(shifted, name)
        moved[name] = [torch.empty(1100 + offset, dtype=tensor.dtype)[offset:].copy_(tensor)]
    shifted = Batch(**moved, steps=shifted.steps, share=shifted.share)
    step(aligned)
    step(shifted)
    assert all(map(torch.equal, bits(aligned), bits(shifted)))


@pytest.mark.parametrize(("dtype", "unit"), [(torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-7)])
def test_low_precision_is_computed_in_float32(make_batch, dtype, unit):
    """Weights and moments are rounded once, the average is of the rounded weights and exact to float32.

    The interpreter cuts off where a GPU rounds to nearest, so for bfloat16 a whole unit is allowed, not half of one.
    """
    batch = make_batch([(1030,), (3,)], dtype, rounds=True)
    wide = Batch(*([one.to(torch.float32, copy=True) for one in column] for column in columns_of(batch)), share=0.1)
    old = copy.deepcopy(batch.averages)
    step(batch, divisor=3.0)
    step(wide, divisor=3.0)
    for low, exact in zip(
        (batch.weights, batch.firsts, batch.seconds), (wide.weights, wide.firsts, wide.seconds), strict=True
    ):
        torch.testing.assert_close([one.float() for one in low], exact, rtol=unit, atol=1e-6)
    for average, was, weight in zip(batch.averages, old, batch.weights, strict=True):
        torch.testing.assert_close(average, was.lerp(weight.float(), 0.1), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close([one.float() for one in batch.rounded], batch.averages, rtol=unit, atol=1e-6)


def columns_of(batch: Batch) -> tuple[list[torch.Tensor], ...]:
    """Return the columns in the order in which a batch is made, without the rounded ones."""
    return batch.weights, batch.gradients, batch.firsts, batch.seconds, batch.steps, batch.averages


def test_a_learning_rate_on_the_device_is_not_read(make_batch, monkeypatch):
    """A tensor as learning rate gives the bits of the number, and the host does not look at it."""
    number, tensor = make_batch(SHAPES), make_batch(SHAPES)
    step(number, Rule(2.0**-7, *RULE_BUT_LR))
    rate = torch.tensor(2.0**-7)
    with monkeypatch.context() as patch:
        for reader in ("item", "tolist", "__float__"):
            patch.setattr(torch.Tensor, reader, None)
        step(tensor, Rule(rate, *RULE_BUT_LR))
    assert all(map(torch.equal, bits(number), bits(tensor)))


def test_a_share_of_one_is_a_copy(make_batch):
    """With a decay of 0 the average is the weight, bit for bit, as with torch's lerp."""
    batch = make_batch([(700,)], share=1.0)
    step(batch)
    assert all(map(torch.equal, batch.averages, batch.weights))


def test_autograd_sees_the_update(make_batch):
    """A graph that kept a weight refuses to be differentiated after the weight has moved."""
    batch = make_batch([(3,)])
    weight = torch.nn.Parameter(batch.weights[0])
    loss = (weight * weight).sum()
    step(Batch([weight], *columns_of(batch)[1:]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
