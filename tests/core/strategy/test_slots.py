"""Plain hooks that own DO_BACKWARD or DO_OPTIMIZER_STEP."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nvalchemi.errors import HookRegistrationError
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateOrchestrator

S = TrainingStage


def backward(ctx, stage):
    ctx.loss.backward()


def step(ctx, stage):
    for optimizer in ctx.optimizers:
        optimizer.step()


def both(ctx, stage):
    (backward if stage is S.DO_BACKWARD else step)(ctx, stage)


OWNERS = [(backward, [S.DO_BACKWARD]), (step, [S.DO_OPTIMIZER_STEP]), (both, [S.DO_BACKWARD, S.DO_OPTIMIZER_STEP])]
NAMES = ["backward", "step", "both"]


@pytest.mark.parametrize("empty", [False, True], ids=["bare", "empty orchestrator"])
@pytest.mark.parametrize(("do", "slots"), OWNERS, ids=NAMES)
def test_a_plain_owner_works_beside_no_update_hook(make_strategy, plain, batches, do, slots, empty):
    """A plain hook that owns DO_BACKWARD, DO_OPTIMIZER_STEP or both trains as the orchestrator does, bit for bit."""
    torch.manual_seed(2)
    owned = nn.Linear(2, 1)
    torch.manual_seed(2)
    usual = nn.Linear(2, 1)
    beside = [TrainingUpdateOrchestrator()] if empty else []
    strategy = make_strategy(plain(do, *slots), *beside, models=owned, num_epochs=2)
    strategy.run(batches)
    make_strategy(models=usual, num_epochs=2).run(batches)
    assert strategy.step_count == 8
    for a, b in zip(owned.parameters(), usual.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("do", "slots"), OWNERS, ids=NAMES)
def test_a_plain_owner_of_a_single_stage_says_so_by_stage(make_strategy, batches, do, slots):
    """An owner may name its slot by `stage` as well."""

    class Owner:
        frequency = 1

        def __init__(self, stage):
            self.stage = stage

        def __call__(self, ctx, stage):
            do(ctx, stage)

    strategy = make_strategy(*map(Owner, slots))
    strategy.run(batches)
    assert strategy.step_count == 4


@pytest.mark.parametrize("composed", [False, True], ids=["bare", "orchestrator"])
@pytest.mark.parametrize(("do", "slots"), OWNERS, ids=NAMES)
def test_a_plain_owner_beside_update_hooks_is_refused(make_strategy, plain, trace, do, slots, composed):
    """Beside update hooks a plain owner of a slot is refused, naming the slot, both parties, and the remedy."""
    update = TrainingUpdateOrchestrator(trace()) if composed else trace()
    with pytest.raises(
        HookRegistrationError, match=r"claims DO_\w+, which Plain owns already.*one owner.*update hook"
    ) as i:
        make_strategy(plain(do, *slots), update)
    assert "TrainingUpdateOrchestrator" in str(i.value)


def test_two_plain_owners_of_one_slot_are_refused(make_strategy, plain):
    """Two plain hooks that own one slot are refused, naming both and the slot."""

    class Other(plain):
        pass

    with pytest.raises(HookRegistrationError, match="Other claims DO_BACKWARD, which Plain owns already"):
        make_strategy(plain(backward, S.DO_BACKWARD), Other(backward, S.DO_BACKWARD))


def test_an_owner_of_the_step_says_that_it_was_skipped(make_strategy, plain, batches):
    """Who owns DO_OPTIMIZER_STEP sets `ctx.step_skipped`, and the counters follow."""

    def every_other(ctx, stage):
        ctx.step_skipped = ctx.batch_count % 2 == 1
        if not ctx.step_skipped:
            step(ctx, stage)

    seen = []
    spy = plain(lambda ctx, stage: seen.append(ctx.step_skipped), S.AFTER_OPTIMIZER_STEP, S.AFTER_BATCH)
    strategy = make_strategy(plain(every_other, S.DO_OPTIMIZER_STEP), spy)
    strategy.run(batches)
    assert (strategy.step_count, strategy.batch_count) == (2, 4)
    assert seen == [False, False, True, True] * 2


def test_an_owner_of_the_step_that_says_nothing_has_stepped(make_strategy, plain, batches):
    """A skipped batch does not make the next one skipped: without a word the step is counted."""
    strategy = make_strategy(plain(step, S.DO_OPTIMIZER_STEP))
    assert [strategy.train_batch(batch).step_skipped for batch in batches] == [False] * 4


@pytest.mark.parametrize(("do", "slots"), OWNERS, ids=NAMES)
def test_beside_an_owner_the_context_still_knows_gradients(make_strategy, plain, batches, do, slots):
    """`ctx.grad_norm` and `ctx.gradients` are true beside a plain owner too, and None of them is left from before."""
    seen = []

    def look(ctx, stage):
        seen.append((float(ctx.grad_norm), {name: grad.clone() for name, grad in ctx.gradients.items()}))

    strategy = make_strategy(plain(do, *slots), plain(look, S.BEFORE_OPTIMIZER_STEP))
    for batch in batches:
        strategy.train_batch(batch)
    for norm, gradients in seen:
        flat = torch.cat([grad.flatten() for grad in gradients.values()])
        assert norm == pytest.approx(float(flat.norm()), rel=1e-6)
    assert len({norm for norm, _ in seen}) == 4


def test_ctx_loss_is_detached_after_an_owner_of_backward(make_strategy, plain, batches):
    """After a plain owner's DO_BACKWARD `ctx.loss` is detached and there, whatever the owner left."""

    def consume(ctx, stage):
        ctx.loss.backward()
        ctx.loss = None

    seen = []
    spy = plain(lambda ctx, stage: seen.append(ctx.loss.requires_grad), S.AFTER_BACKWARD)
    ctx = make_strategy(plain(consume, S.DO_BACKWARD), spy).train_batch(batches[0])
    assert seen == [False]
    assert ctx.loss.grad_fn is None
