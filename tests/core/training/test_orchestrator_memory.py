"""No graph outlives its batch."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import AlwaysVeto, PassThrough, TrainingUpdateHook, TrainingUpdateOrchestrator


class Square(torch.autograd.Function):
    """Saves a tensor of its own, and tells the test of it."""

    saved: weakref.ref

    @staticmethod
    def forward(ctx, x):
        ours = x * 2
        ctx.save_for_backward(ours)
        ctx.ours = ours  # the unpacked tensor is another object; this one lives as long as the graph
        Square.saved = weakref.ref(ours)
        return x.square()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.ours


class KeepsTheLoss(TrainingUpdateHook):
    """A logger that stores the loss of the context at every stage but the one that transforms it."""

    def __init__(self):
        self.kept = []

    def after_optimizer_step(self, ctx, *, skipped):
        self.kept.append(ctx.loss)


class RaiseAt(TrainingUpdateHook):
    """Raises at a stage."""

    def __init__(self, stage):
        self.stage = stage

    def __call__(self, ctx, stage, will_skip=False):
        if stage.name == self.stage:
            raise ArithmeticError("mine")
        return True, ctx.loss


def batch(orchestrator, *, scaler=None) -> TrainContext:
    parameter = torch.nn.Parameter(torch.tensor(3.0))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with TrainContext(optimizers=[optimizer], grad_scaler=scaler) as ctx:
        orchestrator(ctx, TrainingStage.BEFORE_BATCH)
        ctx.loss = Square.apply(parameter)
        ctx.losses = {"part": ctx.loss * 1.0}
        for stage in ("DO_BACKWARD", "DO_OPTIMIZER_STEP", "AFTER_OPTIMIZER_STEP"):
            orchestrator(ctx, TrainingStage[stage])
    return ctx


@pytest.fixture(autouse=True)
def no_collector():
    """What dies here dies by itself: no cycle waits for the garbage collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "hooks", [[], [PassThrough()], [KeepsTheLoss()], [AlwaysVeto()], [KeepsTheLoss(), AlwaysVeto()]]
)
def test_the_graph_dies_with_the_batch(hooks):
    """A tensor saved for the backward pass is dead after the batch, also after a veto and with a logger of losses."""
    orchestrator = TrainingUpdateOrchestrator(*hooks)
    ctx = batch(orchestrator)
    assert Square.saved() is None
    assert ctx.loss.grad_fn is None
    assert ctx.losses["part"].grad_fn is None


@pytest.mark.parametrize("stage", ["DO_BACKWARD", "DO_OPTIMIZER_STEP", "AFTER_OPTIMIZER_STEP"])
def test_the_graph_dies_also_after_an_exception(stage):
    """It is dead after a batch that raised, wherever that was, once the exception is handled."""
    orchestrator = TrainingUpdateOrchestrator(PassThrough(), RaiseAt(stage))
    try:
        batch(orchestrator)
    except ArithmeticError:
        handled = True
    assert handled
    assert Square.saved() is None


def test_the_graph_dies_with_a_scaler(counting_scaler, scale):
    """A loss that was scaled keeps no graph either."""
    orchestrator = TrainingUpdateOrchestrator(scale(counting_scaler()))
    batch(orchestrator)
    assert Square.saved() is None


def test_a_batch_that_is_given_up_keeps_nothing():
    """A batch that ends before its backward pass lets go of the graph with its context."""
    with pytest.raises(KeyboardInterrupt), TrainContext() as ctx:  # noqa: PT012 - the block is the point
        ctx.loss = Square.apply(torch.nn.Parameter(torch.tensor(3.0)))
        raise KeyboardInterrupt
    assert ctx.loss.grad_fn is None
    assert Square.saved() is None


def test_gradients_of_the_last_batch_are_not_held_on_to():
    """Gradients that were zeroed are freed: the orchestrator keeps no copy of its own between batches."""
    orchestrator = TrainingUpdateOrchestrator(AlwaysVeto())
    parameter = torch.nn.Parameter(torch.ones(10))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    ctx = TrainContext(optimizers=[optimizer], loss=parameter.sum())
    for stage in ("DO_BACKWARD", "DO_OPTIMIZER_STEP", "AFTER_OPTIMIZER_STEP"):
        orchestrator(ctx, TrainingStage[stage])
    gradient = weakref.ref(parameter.grad)
    del ctx
    optimizer.zero_grad()
    orchestrator(TrainContext(optimizers=[optimizer]), TrainingStage.BEFORE_BATCH)
    assert gradient() is None
