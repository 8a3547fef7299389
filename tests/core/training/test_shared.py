"""Numbers that hooks share over ranks, where there is one rank."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.errors import HookContractError
from nvalchemi.hooks import TrainContext
from nvalchemi.testing import AccumulatingHook, UpdateLoop
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator


class Sharing(TrainingUpdateHook):
    """Shares a value at a stage, and keeps what it comes to."""

    reads_grad = False

    def __init__(self, value=3.0, at="transform_loss"):
        self.value, self.at, self.seen = value, at, []

    def before_batch(self, ctx, *, will_skip):
        if self.at == "before_batch":
            self.shared = ctx.share(self.value)
        return True

    def transform_loss(self, ctx, loss):
        if self.at == "transform_loss":
            self.shared = ctx.share(self.value)
        return loss

    def before_optimizer_step(self, ctx, *, will_skip):
        if self.at == "before_optimizer_step":
            self.shared = ctx.share(self.value)
        self.seen.append((self.shared.total.item(), self.shared.mean.item()))
        return True


@pytest.fixture
def weight():
    return torch.nn.Parameter(torch.zeros(2))


@pytest.fixture
def loop(weight):
    def build(*hooks):
        return UpdateLoop(*hooks, optimizers=[torch.optim.SGD([weight], lr=1.0)])

    return build


@pytest.mark.parametrize("at", ["before_batch", "transform_loss"])
def test_one_rank_shares_with_itself(loop, weight, at):
    """In one process total and mean are what was given, wherever it was shared, batch after batch."""
    hook = Sharing(at=at)
    batches = loop(hook)
    for value in (3.0, 4.0):
        hook.value = value
        batches.batch({weight: [1.0, 1.0]})
    assert hook.seen == [(3.0, 3.0), (4.0, 4.0)]


@pytest.mark.parametrize("given", [2, 2.5, True, torch.tensor(2.5), torch.tensor(2.5, dtype=torch.float64)])
def test_a_total_has_the_dtype_of_what_was_given(loop, weight, given):
    """A tensor's total has its dtype, that of a number is float64."""
    hook = Sharing(given)
    loop(hook).batch({weight: [1.0, 1.0]})
    assert hook.shared.total.item() == float(given)
    assert hook.shared.total.dtype == (given.dtype if isinstance(given, torch.Tensor) else torch.float64)


def test_a_tensor_is_shared_as_it_is_now(weight):
    """What is done to a tensor after it was shared changes nothing."""
    value = torch.tensor(2.0)
    orchestrator = TrainingUpdateOrchestrator()
    with TrainContext(optimizers=[torch.optim.SGD([weight])]) as ctx:
        orchestrator(ctx, TrainingStage.BEFORE_BATCH)
        shared = ctx.share(value)
        value.fill_(7.0)
        orchestrator(ctx, TrainingStage.DO_OPTIMIZER_STEP)
    assert shared.total.item() == 2.0


def test_a_window_of_several_batches_keeps_what_each_has_shared(loop, weight):
    """What a batch shared while the window was open is known when it is complete."""
    hook = Sharing(at="before_batch")
    batches = loop(AccumulatingHook(2), hook)
    batches.batch({weight: [1.0, 1.0]})
    first = hook.shared
    with pytest.raises(HookContractError, match="before the ranks have exchanged it"):
        _ = first.total
    batches.batch({weight: [1.0, 1.0]})
    assert (first.total.item(), hook.seen) == (3.0, [(3.0, 3.0)])


def test_a_batch_that_was_left_shares_no_more(weight):
    """What a batch shared that never came to its step is forgotten with its gradients; what comes next is kept."""
    hook, optimizer = Sharing(at="before_batch"), torch.optim.SGD([weight])
    orchestrator = TrainingUpdateOrchestrator(hook)
    for _ in range(2):
        with TrainContext(optimizers=[optimizer]) as ctx:
            orchestrator(ctx, TrainingStage.BEFORE_BATCH)
    assert ctx.window.shared == (hook.shared,)


@pytest.mark.parametrize("wrong", ["1", None, torch.zeros(2), torch.tensor(1j)])
def test_only_numbers_are_shared(loop, weight, wrong):
    """What is no number is refused, by its value."""
    with pytest.raises(HookContractError, match="ctx.share got"):
        loop(Sharing(wrong)).batch({weight: [1.0, 1.0]})


def test_nothing_is_shared_once_hooks_decide(loop, weight):
    """Sharing in the vote comes too late, and the message says where to do it."""
    with pytest.raises(HookContractError, match="share it earlier, in transform_loss"):
        loop(Sharing(at="before_optimizer_step")).batch({weight: [1.0, 1.0]})


def test_sharing_needs_an_orchestrator():
    """Without an orchestrator there is nobody to exchange anything."""
    with pytest.raises(RuntimeError, match=r"ctx.share was asked before"):
        TrainContext().share(1.0)


def test_reading_too_early_says_where_to_read(weight):
    """Before the vote a total is not known: the message says when it is."""
    with TrainContext(optimizers=[torch.optim.SGD([weight])]) as ctx:
        TrainingUpdateOrchestrator()(ctx, TrainingStage.BEFORE_BATCH)
        with pytest.raises(HookContractError, match="read it in before_optimizer_step or later"):
            _ = ctx.share(1.0).mean
