"""The average where the host does not know yet whether a step was executed."""

from __future__ import annotations

import copy
import pickle
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nvalchemi.hooks import TrainContext
from nvalchemi.testing import StepCost
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator
from nvalchemi_hooks_ema import EMAHook


class DeferAt(TrainingUpdateHook):
    """Vetoes the batches with the given numbers, on the device."""

    reads_grad = False
    defers_veto = True

    def __init__(self, *batches: int):
        self.batches = batches

    def before_optimizer_step(self, ctx, *, will_skip: bool) -> bool:
        ctx.defer_veto(torch.tensor(float(ctx.batch_count in self.batches)), "its number is up")
        return True


class AsksFirst(TrainingUpdateHook):
    """Wants to know the outcome before the average is told of the step."""

    priority = 45
    reads_grad = False
    defers_veto = True

    def after_optimizer_step(self, ctx, *, skipped: bool) -> None:
        self.answer = ctx.step_skipped


class Net(nn.Module):
    """float32 weights that are trained, and of everything else something that follows along."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 1))
        self.layers[3].weight = nn.Parameter(self.layers[2].weight[:1].detach().clone())
        self.narrow = nn.Parameter(torch.ones(5, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("low", torch.ones(2, dtype=torch.float16))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x):
        for tensor in (self.narrow, self.phase, self.low):
            tensor.data.add_(0.25)
        self.mask.logical_not_()
        return self.layers(x)


class Loop:
    """A loop by hand that can be stopped after every batch."""

    def __init__(self, *hooks, lazy=True, model=None):
        self.model = Net() if model is None else model
        self.orchestrator = TrainingUpdateOrchestrator(*hooks, lazy=lazy)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01, fused=True)
        self.steps = self.batches = 0
        self.data = torch.Generator().manual_seed(0)
        with self.context() as ctx:
            self.orchestrator(ctx, TrainingStage.SETUP)

    def context(self) -> TrainContext:
        models, optimizers = {"main": self.model}, [self.optimizer]
        return TrainContext(models=models, optimizers=optimizers, step_count=self.steps, batch_count=self.batches)

    def batch(self) -> TrainContext:
        """One batch, up to AFTER_OPTIMIZER_STEP; nobody asks for the outcome."""
        with self.context() as ctx:
            self.orchestrator(ctx, TrainingStage.BEFORE_BATCH)
            ctx.loss = self.model(torch.randn(4, 3, generator=self.data)).square().mean()
            self.orchestrator(ctx, TrainingStage.DO_BACKWARD)
            self.orchestrator(ctx, TrainingStage.DO_OPTIMIZER_STEP)
            self.orchestrator(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
        self.batches += 1
        return ctx

    def run(self, batches: int) -> None:
        for _ in range(batches):
            self.steps += not self.batch().step_skipped


def bits(hook: EMAHook) -> dict[str, list[int]]:
    """Every bit of the averaged model and the accumulators, without asking whether a step is decided."""
    shadow = hook.__pydantic_private__["_shadow"]
    held = {**shadow.averaged.state_dict(), **shadow.accumulators}
    return {name: tensor.contiguous().reshape(-1).view(torch.uint8).tolist() for name, tensor in held.items()}


@settings(deadline=None, max_examples=25)
@given(
    st.sets(st.integers(0, 9)),
    st.sampled_from([{}, {"decay": 0.3}, {"start_step": 3}, {"update_every": 2}, {"use_buffers": False}]),
)
def test_lazy_and_eager_have_the_same_bits(vetoes, options):
    """Whatever is vetoed on the device, average, accumulators and counters are those of a host that always knew."""
    results = []
    for lazy in (False, True):
        hook = EMAHook(**{"decay": 0.9, **options})
        loop = Loop(DeferAt(*vetoes), hook, lazy=lazy)
        loop.run(10)
        results.append((loop.steps, hook.num_updates, bits(hook)))
    assert results[0] == results[1]


def test_a_skipped_step_leaves_every_bit_of_the_average_before_the_host_knows():
    """A veto on the device holds averages and accumulators, though a plain blend would move them."""
    hook = EMAHook(decay=0.9)
    loop = Loop(DeferAt(3, 4), hook)
    loop.run(3)
    for _ in range(2):
        before = bits(hook)
        with torch.no_grad():
            loop.model.narrow.fill_(torch.inf)
        ctx = loop.batch()
        assert loop.orchestrator.pending is not None
        assert bits(hook) == before
        assert ctx.step_skipped
    loop.model.narrow.data.fill_(2.0)
    loop.batch()
    assert loop.orchestrator.pending is not None
    assert all(bits(hook)[name] != before[name] for name in before if name.endswith("weight"))


def test_updates_are_counted_when_the_host_knows():
    """num_updates and n_averaged follow when the step is settled, once, if it was taken."""
    hook = EMAHook(decay=0.9)
    loop = Loop(DeferAt(3), hook)
    loop.run(2)
    assert hook.num_updates == 2
    for taken, counted in ((1, 3), (0, 3), (1, 4)):
        loop.batch()
        loop.orchestrator.resolve()
        loop.orchestrator.resolve()
        assert hook.num_updates == int(hook.get_averaged_model().n_averaged) == counted
        loop.steps += taken


@pytest.mark.parametrize(("start_step", "update_every", "updates"), [(3, 1, [3, 4, 5]), (0, 2, [2, 4]), (3, 2, [4])])
@pytest.mark.parametrize("lazy", [False, True])
def test_it_counts_the_steps_before_their_counter_moves(lazy, start_step, update_every, updates):
    """start_step and update_every see the number of the step at hand, in both modes; vetoed batches do not count."""
    hook, seen = EMAHook(start_step=start_step, update_every=update_every), []
    loop = Loop(DeferAt(0, 3), hook, lazy=lazy)
    while loop.steps < 5:
        before = hook.num_updates
        loop.run(1)
        if hook.num_updates > before:
            seen.append(loop.steps)
    assert seen == updates


def test_the_first_copy_asks_at_once():
    """Before anything was averaged a step is decided, so that no average begins with a step that was not taken."""
    hook = EMAHook(start_step=2)
    loop = Loop(DeferAt(1), hook)
    loop.run(1)
    loop.batch()
    assert loop.orchestrator.pending is None
    assert (hook.num_updates, int(hook.get_averaged_model().n_averaged)) == (0, 0)
    loop.batch()
    assert (hook.num_updates, int(hook.get_averaged_model().n_averaged)) == (1, 1)
    assert torch.equal(hook.get_averaged_model().module.layers[0].weight, loop.model.layers[0].weight)


@pytest.mark.parametrize("vetoed", [True, False])
def test_a_hook_that_asks_before_it_changes_nothing(vetoed):
    """Where the outcome is known by the time the average is told, it is told the truth, and counts once."""
    results = []
    for hooks in ((), (AsksFirst(),)):
        hook = EMAHook(decay=0.9)
        loop = Loop(DeferAt(*[3] * vetoed), hook, *hooks)
        loop.run(5)
        results.append((hook.num_updates, bits(hook)))
    assert results[0] == results[1]


@pytest.mark.parametrize("taken", [True, False])
def test_a_state_waits_for_the_decision(taken, same):
    """A state, a pickle and a copy taken right after a batch hold the counter and the weights of the same step."""
    hook = EMAHook(decay=0.9)
    loop = Loop(DeferAt(*[] if taken else [3]), hook)
    loop.run(3)
    for take in (EMAHook.state_dict, lambda h: pickle.loads(pickle.dumps(h)), copy.deepcopy):
        loop.batches = 3
        loop.batch()
        assert loop.orchestrator.pending is not None
        copied = take(hook)
        state = copied if isinstance(copied, dict) else copied.state_dict()
        assert state["num_updates"] == state["averaged_model_state"]["n_averaged"].item() == hook.num_updates
        assert same(state, hook.state_dict())
        loop.steps += taken


def test_a_state_taken_before_the_others_know_has_counted_already():
    """A hook that saves the average in the middle of AFTER_OPTIMIZER_STEP finds the counter of that very step."""

    class Saves(DeferAt):
        priority = 60

        def after_optimizer_step(self, ctx, *, skipped: bool) -> None:
            state = hook.state_dict()
            self.pairs = [
                *getattr(self, "pairs", []),
                (state["num_updates"], int(hook.get_averaged_model().n_averaged)),
            ]

    hook, saves = EMAHook(decay=0.9), Saves(3)
    loop = Loop(hook, saves)
    loop.run(5)
    assert saves.pairs == [(1, 1), (2, 2), (3, 3), (3, 3), (4, 4)]
    assert hook.num_updates == loop.steps == 4


def test_a_state_loaded_over_an_undecided_step_is_what_holds(same):
    """A step that is decided after a state was loaded does not count towards that state."""
    hook = EMAHook(decay=0.9)
    loop = Loop(DeferAt(), hook)
    loop.run(3)
    saved = hook.state_dict()
    loop.batch()
    hook.load_state_dict(saved)
    loop.orchestrator.resolve()
    assert same(hook.state_dict(), saved)


class Counted(EMAHook):
    """Keeps the cost of its latest update."""

    cost: ClassVar[StepCost]

    def after_optimizer_step(self, ctx, *, skipped: bool) -> None:
        with StepCost() as cost:
            super().after_optimizer_step(ctx, skipped=skipped)
        type(self).cost = cost


class Many(nn.Module):
    """As many weights as one likes, of 64 elements each."""

    def __init__(self, count: int):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(64)) for _ in range(count)])

    def forward(self, x):
        return sum(weight.sum() for weight in self.weights) * x.sum()


@pytest.mark.parametrize("count", [8, 300])
def test_an_update_under_a_veto_is_one_pass_and_no_host_read(count):
    """One operation for all weights, 12 bytes a parameter, and nothing asks the device."""
    loop = Loop(DeferAt(), Counted(), model=Many(count))
    loop.run(2)
    loop.batch()
    assert loop.orchestrator.pending is not None
    cost = Counted.cost
    assert (cost.host_reads, cost.ops) == (0, 1)  # it is counted when it is settled
    assert (
        sum(cost.bytes_by_name[name] for name in ("_fused_sgd_", "_foreach_lerp_")) == 12 * 64 * count + 4
    )  # and the veto
