"""DO_BACKWARD: the loss is handed from child to child, and backward runs once."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import PassThrough, TrainingUpdateHook


class Times(TrainingUpdateHook):
    """Multiplies the loss and keeps what it was given."""

    def __init__(self, factor, label=None):
        self.factor = factor
        self.labelled(label or f"times_{factor}")
        self.seen = []

    def transform_loss(self, ctx, loss):
        assert ctx.loss is loss
        self.seen.append(loss.item())
        return loss * self.factor


class Returns(TrainingUpdateHook):
    """Returns whatever it is told instead of a loss."""

    def __init__(self, answer):
        self.answer = answer

    def transform_loss(self, ctx, loss):
        return self.answer(loss) if callable(self.answer) else self.answer


@pytest.fixture
def backwards(monkeypatch):
    """The losses on which ``backward()`` ran."""
    calls = []
    real = torch.Tensor.backward
    monkeypatch.setattr(
        torch.Tensor, "backward", lambda self, *a, **k: (calls.append(self.item()), real(self, *a, **k))
    )
    return calls


def backward(loop, loss):
    ctx = loop.context()
    loop.orchestrator(ctx, TrainingStage.BEFORE_BATCH)
    ctx.loss = loss
    loop.orchestrator(ctx, TrainingStage.DO_BACKWARD)
    return ctx


def test_each_child_sees_what_its_predecessor_returned(make_loop):
    """While each child runs, ``ctx.loss`` is what its predecessor returned."""
    hooks = Times(2.0), Times(5.0), Times(7.0)
    loop = make_loop(*hooks)
    backward(loop, loop.loss(3.0))
    assert [hook.seen for hook in hooks] == [[3.0], [6.0], [30.0]]
    assert loop.grads == [3.0 * 2.0 * 5.0 * 7.0]


@pytest.mark.parametrize("hooks", [[], [PassThrough()], [Times(2.0), Times(5.0), Times(7.0)]])
def test_backward_runs_once_on_the_last(make_loop, backwards, hooks):
    """``backward()`` runs once, on the last loss, however many children there are."""
    loop = make_loop(*hooks)
    backward(loop, loop.loss(3.0))
    assert backwards == [210.0 if len(hooks) == 3 else 3.0]


@pytest.mark.parametrize("factors", [(0.5, 2.0), (2.0, 0.5)])
def test_half_and_double_leave_the_loss_as_it_was(make_loop, factors):
    """A ``*0.5`` hook and a ``*2.0`` hook leave the loss, and the gradients, as they were, bit for bit."""
    values = torch.randn(50, generator=torch.Generator().manual_seed(1))
    plain, both = make_loop(weights=(values,)), make_loop(*map(Times, factors), weights=(values,))
    for loop in (plain, both):
        loop.batch(values.square() / 3)
    assert torch.equal(plain.parameters[0], both.parameters[0])


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (None, "the loss that was given is None"),
        (3.0, "the loss that was given is 3.0"),
        (torch.tensor(1.0), "the loss that was given has no graph"),
    ],
    ids=["None", "float", "no graph"],
)
@pytest.mark.parametrize("hooks", [0, 1, 2])
def test_a_loss_that_cannot_be_differentiated(make_loop, backwards, loss, message, hooks):
    """A None or non-tensor loss, or one without a graph, is a `TypeError` before any backward."""
    loop = make_loop(*[Times(2.0), Times(3.0)][:hooks])
    with pytest.raises(TypeError, match=message):
        backward(loop, loss)
    assert backwards == []
    assert loop.grads == [None]


@pytest.mark.parametrize(
    "answer", [None, 3.0, "loss", torch.tensor(1.0), lambda loss: loss.detach(), lambda loss: loss.item()]
)
@pytest.mark.parametrize("after", [0, 1])
def test_a_child_that_returns_no_loss(make_loop, backwards, answer, after):
    """A child that returns no tensor, or one without a graph, is a `TypeError` that names it, before any backward."""
    loop = make_loop(Times(2.0), Returns(answer), *[Times(3.0)][:after])
    with pytest.raises(TypeError, match="DO_BACKWARD.* what Returns returned"):
        backward(loop, loop.loss(3.0))
    assert backwards == []
    assert loop.grads == [None]


def test_every_child_is_given_a_loss_that_is_checked(make_loop):
    """A loss that was never set is refused before a child is called with it."""
    hook = Times(2.0)
    with pytest.raises(TypeError, match="None"):
        backward(make_loop(hook), None)
    assert hook.seen == []


def test_a_loss_that_is_no_scalar_is_refused_with_its_shape(make_loop):
    """A loss with several elements is a TypeError with its shape, and ``ctx.loss`` is detached all the same."""
    loop = make_loop(weights=(torch.ones(2),))
    ctx = loop.context(loss=loop.parameters[0] * 2)
    with pytest.raises(TypeError, match=r"scalar.*shape \(2,\); take its mean or sum"):
        loop.orchestrator(ctx, TrainingStage.DO_BACKWARD)
    assert not ctx.loss.requires_grad


def test_afterwards_the_loss_is_detached_and_untransformed(make_loop):
    """From AFTER_BACKWARD on, ``ctx.loss`` is the detached value before any update hook transformed it."""
    loop = make_loop(Times(2.0), Times(5.0))
    ctx = backward(loop, loop.loss(3.0))
    assert ctx.loss.item() == 3.0
    assert (ctx.loss.grad_fn, ctx.loss.requires_grad) == (None, False)


def test_the_parts_of_the_loss_are_detached_too(make_loop):
    """``ctx.losses`` holds detached values after the backward pass."""
    loop = make_loop()
    ctx = loop.context(loss=loop.loss(3.0), losses={"energy": loop.loss(1.0), "forces": loop.loss(2.0)})
    loop.orchestrator(ctx, TrainingStage.DO_BACKWARD)
    assert {name: part.item() for name, part in ctx.losses.items()} == {"energy": 1.0, "forces": 2.0}
    assert not any(part.requires_grad for part in ctx.losses.values())


class RaisesInBackward(torch.autograd.Function):
    """Fails while gradients are computed."""

    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("in backward")


def fail(loss):
    raise ArithmeticError("in a child")


@pytest.mark.parametrize("answer", [fail, RaisesInBackward.apply], ids=["child", "backward"])
def test_the_loss_is_detached_also_when_something_raises(make_loop, answer):
    """``ctx.loss`` is the detached original also when a child or the backward pass raises."""
    loop = make_loop(Times(2.0), Returns(answer))
    ctx = loop.context(loss=loop.loss(3.0))
    with pytest.raises(ArithmeticError):
        loop.orchestrator(ctx, TrainingStage.DO_BACKWARD)
    assert ctx.loss.item() == 3.0
    assert not ctx.loss.requires_grad


@pytest.mark.parametrize("answer", [fail, RaisesInBackward.apply], ids=["child", "backward"])
def test_the_parts_are_detached_also_when_something_raises(make_loop, answer):
    """``ctx.losses`` is detached at the end of the batch also when a child or the backward pass raises."""
    loop = make_loop(Returns(answer))
    ctx = loop.context(loss=loop.loss(3.0), losses={"energy": loop.loss(1.0)})
    with pytest.raises(ArithmeticError), ctx:
        loop.orchestrator(ctx, TrainingStage.DO_BACKWARD)
    assert not ctx.losses["energy"].requires_grad


def test_a_child_with_its_own_call_is_threaded_alike(make_loop):
    """A hook that overrides ``__call__`` reads ``ctx.loss`` and returns the next loss in its pair."""

    class Own(TrainingUpdateHook):
        def __call__(self, ctx, stage, will_skip=False):
            return True, ctx.loss * 5.0 if stage is TrainingStage.DO_BACKWARD else ctx.loss

    last = Times(1.0)
    loop = make_loop(Times(2.0), Own(), last)
    backward(loop, loop.loss(3.0))
    assert last.seen == [30.0]
    assert loop.grads == [30.0]
