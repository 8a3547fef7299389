"""The average in the hands of whoever carries out the optimizers' steps."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import AverageOffer, OptimizerPlan, TrainingUpdateHook, TrainingUpdateOrchestrator
from nvalchemi_hooks_ema import EMAHook


def takes_all(offer: AverageOffer) -> bool:
    return True


class OneWalk(TrainingUpdateHook):
    """Brings an executor that does the step of a plain SGD, and each average of its weights along with it."""

    reads_grad = False
    defers_veto = True

    def __init__(self, wants: Callable[[AverageOffer], bool] = takes_all):
        self.wants = wants
        self.offers: list[AverageOffer] = []

    def update_executor(self) -> OneWalk:
        return self

    @torch.no_grad()
    def execute(self, plan: OptimizerPlan) -> bool:
        stop = torch.zeros(()) if plan.veto_flag is None else plan.veto_flag
        for group in plan.optimizer.param_groups:
            for weight in (p for p in group["params"] if p.grad is not None):
                grad = weight.grad if plan.divisor is None else weight.grad / plan.divisor
                weight.copy_(torch.where(stop.ne(0), weight, weight - group["lr"] * grad.to(weight.dtype)))
        free = {id(weight) for weight in plan.parameters}
        self.offers = [offer for offer in plan.averages if offer.live]
        for offer in self.offers:
            live = {id(weight) for weight in offer.live}
            if live <= free and self.wants(offer):
                free -= live
                self.average(offer, stop)
        return True

    def average(self, offer: AverageOffer, stop: torch.Tensor) -> None:
        wide = offer.averages if offer.accumulators is None else offer.accumulators
        for shown, average, live in zip(offer.averages, wide, offer.live, strict=True):
            blended = torch.lerp(average, live.to(average.dtype), offer.weight)
            average.copy_(torch.where(stop.ne(0), average, blended))
            if shown is not average:
                shown.copy_(average)
        offer.taken = True


class DeferAt(TrainingUpdateHook):
    """Vetoes the batches with the given numbers, on the device."""

    reads_grad = False
    defers_veto = True

    def __init__(self, *batches: int):
        self.batches = batches

    def before_optimizer_step(self, ctx, *, will_skip: bool) -> bool:
        ctx.defer_veto(torch.tensor(float(ctx.batch_count in self.batches)), "its number is up")
        return True


class Net(nn.Module):
    """Weights that are tied, frozen, unused, narrow; a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))
        self.narrow = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

    def forward(self, x):
        self.frozen.data.add_(1.0)  # whoever owns it
        return self.last(self.norm(self.second(self.first(x))) * self.narrow.float())


def trained(
    *hooks, lazy: bool = False, optimizers: int = 1, batches: int = 8, between=lambda batch, model: None
) -> Net:
    model = Net()
    orchestrator = TrainingUpdateOrchestrator(*hooks, lazy=lazy)
    weights = [p for p in model.parameters() if p.requires_grad]
    steppers = [torch.optim.SGD(weights[place::optimizers], lr=0.05) for place in range(optimizers)]
    generator, steps = torch.Generator().manual_seed(1), 0
    with TrainContext(models={"main": model}, optimizers=steppers) as ctx:
        orchestrator(ctx, TrainingStage.SETUP)
    for batch in range(batches):
        models = {"main": model}
        with TrainContext(models=models, optimizers=steppers, step_count=steps, batch_count=batch) as ctx:
            orchestrator(ctx, TrainingStage.BEFORE_BATCH)
            ctx.loss = model(torch.randn(4, 3, generator=generator)).square().mean()
            orchestrator(ctx, TrainingStage.DO_BACKWARD)
            orchestrator(ctx, TrainingStage.DO_OPTIMIZER_STEP)
            orchestrator(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
        between(batch, model)
        steps += not ctx.step_skipped
    orchestrator.resolve()
    return model


@settings(deadline=None, max_examples=40)
@given(
    st.sets(st.integers(0, 7)),
    st.sampled_from([{}, {"update_every": 2}, {"start_step": 3}, {"use_buffers": False}, {"decay": 0.3}]),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.sampled_from(["all", "none", "float32", "first"]),
)
def test_it_does_not_matter_who_averages(vetoes, options, lazy, optimizers, wants):
    """Offers that are taken, in part or not at all, give the bits of an average that sees to itself."""
    wanted = {
        "all": takes_all,
        "none": lambda offer: False,
        "float32": lambda offer: offer.accumulators is None,
        "first": lambda offer: any(live.dim() == 2 for live in offer.live),
    }[wants]
    states = []
    for executor in (OneWalk(lambda offer: False), OneWalk(wanted)):
        hook = EMAHook(**{"decay": 0.9, **options})
        trained(executor, DeferAt(*vetoes), hook, lazy=lazy, optimizers=optimizers)
        states.append(hook.state_dict())
    one, other = states
    assert one["num_updates"] == other["num_updates"]
    for part in ("averaged_model_state", "accumulators"):
        assert one.get(part, {}).keys() == other.get(part, {}).keys()
        assert all(torch.equal(value, other[part][name]) for name, value in one.get(part, {}).items())


def test_what_is_offered_is_what_will_be_stepped():
    """One offer an optimizer and dtype, of parameters with gradients: no buffer, nothing frozen, nothing twice."""
    executor = OneWalk()
    seen = []
    model = trained(executor, EMAHook(decay=0.9), between=lambda batch, model: seen.append(executor.offers))
    assert seen[0] == []  # the first update is a copy
    narrow, wide = sorted(seen[-1], key=lambda offer: len(offer.live))
    names = {id(p): name for name, p in model.named_parameters()}
    assert [names[id(live)] for live in narrow.live] == ["narrow"]
    assert {names[id(live)] for live in wide.live} == {
        "first.weight", "first.bias", "second.bias", "last.weight", "last.bias", "norm.weight", "norm.bias",
    }  # fmt: skip
    assert narrow.accumulators is not None
    assert wide.accumulators is None
    assert narrow.taken
    assert wide.taken
    assert wide.weight == narrow.weight == 1 - 0.9
    assert seen[-1][0].live is seen[-2][0].live  # lists are kept while nothing changes


def test_nothing_is_offered_where_nothing_is_updated():
    """A step that does not count, or that a hook vetoed already, makes no offer."""
    executor, seen = OneWalk(), []
    trained(executor, EMAHook(update_every=3), between=lambda batch, model: seen.append(len(executor.offers)))
    assert seen == [0, 0, 0, 0, 0, 2, 0, 0]


def test_several_averages_may_be_taken_or_left():
    """Two hooks offer the same weights; the executor takes one of them, and both are right."""
    together = EMAHook(decay=0.9), EMAHook(decay=0.5)
    trained(OneWalk(), *together)
    for hook in together:
        alone = EMAHook(decay=hook.decay)
        trained(OneWalk(lambda offer: False), alone)
        for one, other in zip(
            hook.get_averaged_model().parameters(), alone.get_averaged_model().parameters(), strict=True
        ):
            assert torch.equal(one, other)


def test_models_that_changed_are_offered_as_they_are_now():
    """What was replaced between two steps, live or averaged, is neither offered nor averaged; its successor is."""
    states = []
    for wants in (takes_all, lambda offer: False):
        hook = EMAHook(decay=0.9)

        def replace(batch, model, averaged=hook.get_averaged_model):
            if batch == 1:
                averaged().load_state_dict(copy.deepcopy(averaged().state_dict()), assign=True)
            if batch == 3:
                model.first.bias.data = torch.zeros(3)
                model.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
                model.narrow.data = model.narrow.data.float()

        trained(OneWalk(wants), hook, between=replace)
        states.append(hook.state_dict()["averaged_model_state"])
    assert states[0]["module.narrow"].dtype == torch.float32
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_an_offer_of_a_step_that_broke_off_is_forgotten():
    """An error between the step and the average does not make later updates leave anything out."""

    class BreaksOff(TrainingUpdateHook):
        """Fails at its fourth step."""

        priority = 45
        reads_grad = False
        steps = 0

        def after_optimizer_step(self, ctx, *, skipped: bool) -> None:
            self.steps += 1
            if self.steps == 4:
                raise KeyboardInterrupt

    hook = EMAHook(decay=0.5)
    with pytest.raises(KeyboardInterrupt):
        trained(OneWalk(), BreaksOff(), hook)
    before = hook.get_averaged_model().module.last.weight.clone()
    model = trained(hook, batches=1)
    assert torch.equal(hook.get_averaged_model().module.last.weight, before.lerp(model.last.weight, 0.5))


@pytest.mark.parametrize("lazy", [False, True])
def test_weights_that_somebody_wrote_into_a_rounded_average_are_offered(lazy):
    """Averaged weights in bfloat16 that were written between two steps are where an executor goes on, too."""
    states = []
    for wants in (takes_all, lambda offer: False):
        hook = EMAHook(decay=0.9)

        def write(batch, model, hook=hook):
            if batch == 4:
                hook.get_averaged_model().module.narrow.fill_(8.0)

        trained(OneWalk(wants), DeferAt(6), hook, lazy=lazy, between=write)
        states.append(hook.state_dict()["accumulators"]["narrow"])
    assert torch.equal(*states)
    assert states[0].min() > 4.0
