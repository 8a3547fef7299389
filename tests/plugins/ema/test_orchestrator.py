"""The average in a training step, with others that veto and accumulate."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator
from nvalchemi_hooks_ema import EMAHook


class VetoAt(TrainingUpdateHook):
    """Vetoes the batches with the given numbers."""

    reads_grad = False

    def __init__(self, *batches: int):
        self.batches = batches

    def before_optimizer_step(self, ctx, *, will_skip: bool) -> bool:
        return ctx.batch_count not in self.batches


class Accumulate(TrainingUpdateHook):
    """Steps after every k-th batch."""

    priority = 10
    reads_grad = False

    def __init__(self, k: int):
        self.k = k

    def before_batch(self, ctx, *, will_skip: bool) -> bool:
        ctx.window_complete = (ctx.batch_count + 1) % self.k == 0
        return ctx.batch_count % self.k == 0


def run(orchestrator, model, batches, *, lr=0.1, after=lambda ctx: None):
    """A loop by hand; returns the number of executed steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    steps = 0
    generator = torch.Generator().manual_seed(0)
    with TrainContext(models={"main": model}, optimizers=[optimizer]) as ctx:
        orchestrator(ctx, TrainingStage.SETUP)
    for batch in range(batches):
        with TrainContext(models={"main": model}, optimizers=[optimizer], step_count=steps, batch_count=batch) as ctx:
            orchestrator(ctx, TrainingStage.BEFORE_BATCH)
            ctx.loss = model(torch.randn(4, 3, generator=generator)).square().mean()
            orchestrator(ctx, TrainingStage.DO_BACKWARD)
            orchestrator(ctx, TrainingStage.DO_OPTIMIZER_STEP)
            orchestrator(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
            after(ctx)
        steps += not ctx.step_skipped
    return steps


def test_skipped_steps_leave_the_average_untouched(same):
    """On a vetoed batch no bit of the average and no counter changes; the update count equals the step count."""
    torch.manual_seed(0)
    model, hook = nn.Linear(3, 1), EMAHook(decay=0.9)
    states = []

    def note(ctx):
        states.append((ctx.step_skipped, hook.state_dict()))

    steps = run(hook + VetoAt(0, 2, 3), model, 8, after=note)
    assert [skipped for skipped, _ in states] == [True, False, True, True, False, False, False, False]
    for (_, before), (skipped, after) in zip(states, states[1:], strict=False):
        assert same(before, after) == skipped
    assert steps == hook.num_updates == int(hook.get_averaged_model().n_averaged) == 5


@pytest.mark.parametrize("vetoes", [(), (1,), (0, 3)])
def test_the_average_equals_a_replay_by_hand(vetoes):
    """Whatever is skipped, the average is that of the weights after each executed step, bit for bit."""
    torch.manual_seed(0)
    model, hook = nn.Linear(3, 1), EMAHook(decay=0.9)
    executed = []

    def note(ctx):
        if not ctx.step_skipped:
            executed.append(model.weight.detach().clone())

    run(hook + VetoAt(*vetoes), model, 6, after=note)
    expected = executed[0]
    for weight in executed[1:]:
        expected = torch.lerp(expected, weight, 1 - 0.9)
    assert torch.equal(hook.get_averaged_model().module.weight, expected)


def test_one_update_for_each_window_of_accumulation():
    """With four batches a step, eight batches make two updates, of the weights after each step."""

    class Ramp(nn.Module):
        """Its loss has a gradient of -1/4, so that four batches and a learning rate of 1 move the weight by 1."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self):
            return -self.weight / 4

    model, hook = Ramp(), EMAHook(decay=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    orchestrator = Accumulate(4) + hook
    steps = 0
    for batch in range(8):
        with TrainContext(models={"main": model}, optimizers=[optimizer], step_count=steps, batch_count=batch) as ctx:
            orchestrator(ctx, TrainingStage.BEFORE_BATCH)
            ctx.loss = model()
            orchestrator(ctx, TrainingStage.DO_BACKWARD)
            orchestrator(ctx, TrainingStage.DO_OPTIMIZER_STEP)
            orchestrator(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
        steps += not ctx.step_skipped
    assert (steps, hook.num_updates) == (2, 2)
    assert hook.get_averaged_model().module.weight.item() == 1.5  # a copy of 1, then half way to 2


@pytest.mark.parametrize(
    ("start_step", "update_every", "updates"), [(0, 1, [1, 2, 3, 4, 5]), (3, 1, [3, 4, 5]), (0, 2, [2, 4]), (3, 2, [4])]
)
def test_start_step_and_update_every_count_executed_steps(start_step, update_every, updates):
    """Vetoed batches do not count towards start_step and update_every."""
    hook = EMAHook(start_step=start_step, update_every=update_every)
    seen = {}

    def note(ctx):
        seen.setdefault(hook.num_updates, ctx.step_count + 1)

    run(hook + VetoAt(1, 4), nn.Linear(3, 1), 7, after=note)
    seen.pop(0, None)
    assert list(seen.values()) == updates


def test_the_average_changes_nothing_in_the_training(values, same):
    """Weights after ten steps with the average are those without it, bit for bit."""
    results = []
    for hooks in ((), (EMAHook(decay=0.9),)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        run(TrainingUpdateOrchestrator(*hooks), model, 10)
        results.append(values(model))
    assert same(*results)


def test_the_orchestrator_saves_and_restores_it(same):
    """The state of several averages stands under their state keys and finds back to them."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    orchestrator = EMAHook() + EMAHook(decay=0.5)
    run(orchestrator, model, 3)
    state = orchestrator.state_dict()
    assert list(state) == ["ema", "ema[decay=0.5]"]
    resumed = EMAHook(decay=0.5) + EMAHook()
    resumed.load_state_dict(state)
    assert all(same(state[hook.state_key], hook.state_dict()) for hook in resumed.iter_hooks())


def test_an_error_in_the_hook_says_where_it_was():
    """An exception carries a note with hook and stage."""
    with pytest.raises(KeyError) as caught:
        run(TrainingUpdateOrchestrator(EMAHook(model_key="student")), nn.Linear(3, 1), 1)
    assert any("EMAHook" in note and "SETUP" in note for note in caught.value.__notes__)
