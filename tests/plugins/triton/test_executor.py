"""What the executor takes, what it leaves to others, and that it leaves it untouched."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from nvalchemi.hooks import UpdateExecutor
from nvalchemi.testing import StepCost
from nvalchemi.training.hooks import AverageOffer, OptimizerPlan
from nvalchemi_hooks_triton import kernels
from nvalchemi_hooks_triton.executor import OnePassExecutor
from nvalchemi_hooks_triton.kernels import onepass


def stepped(weights, kind=torch.optim.AdamW, **options):
    """Return an optimizer that has taken its first step, with gradients for the next."""
    optimizer = kind(weights, **{"lr": 0.1, "fused": True, **options})
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = torch.ones_like(weight)
    optimizer.step()
    return optimizer


def plan_of(optimizer, **options) -> OptimizerPlan:
    """Return the plan of a step of all parameters."""
    parameters = [weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]
    return OptimizerPlan(optimizer, parameters, **options)


def weights_of(*sizes, dtype=torch.float32) -> list[torch.nn.Parameter]:
    """Return parameters of these sizes."""
    return [torch.nn.Parameter(torch.linspace(-1, 1, size).to(dtype)) for size in sizes]


def snapshot(plan: OptimizerPlan) -> list[torch.Tensor]:
    """Return a copy of everything that a step could change."""
    state = [value for one in plan.optimizer.state.values() for value in one.values()]
    averages = [tensor for offer in plan.averages for tensor in (*offer.averages, *(offer.accumulators or ()))]
    gradients = [weight.grad for weight in plan.parameters]
    return copy.deepcopy([*(weight.detach() for weight in plan.parameters), *gradients, *state, *averages])


def test_it_is_an_executor():
    """It is what the core calls an executor."""
    executor: UpdateExecutor = OnePassExecutor()
    assert callable(executor.execute)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_several_groups_and_dtypes_are_one_plan(kind):
    """Groups with settings of their own and weights of several dtypes are stepped as torch steps them."""
    mine = weights_of(600, 3) + weights_of(40, dtype=torch.float16)
    theirs = copy.deepcopy(mine)
    groups = [[{"params": w[:1], "lr": 0.5}, {"params": w[1:], "weight_decay": 0.0}] for w in (mine, theirs)]
    first, second = (stepped(group, kind) for group in groups)
    executor = OnePassExecutor()
    for _ in range(2):
        assert executor.execute(plan_of(first)) is True
        second.step()
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    assert "one pass, in 3 batches" in executor.describe(plan_of(first))


def changed(optimizer, **options):
    """Change the settings of all groups."""
    for group in optimizer.param_groups:
        group.update(options)
    return optimizer


class Subclass(torch.optim.AdamW):
    """Somebody else's."""


def with_state(optimizer, name, change):
    """Change one entry of every state."""
    for state in optimizer.state.values():
        state[name] = change(state[name])
    return optimizer


def with_gradients(optimizer, change):
    """Change every gradient."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = change(weight.grad)
    return optimizer


def transposed() -> list[torch.nn.Parameter]:
    """Return a weight that is not contiguous."""
    return [torch.nn.Parameter(torch.ones(3, 2).t())]


LEFT = {
    "SGD is not Adam": lambda: plan_of(torch.optim.SGD(weights_of(3), lr=0.1)),
    "Subclass is not Adam": lambda: plan_of(stepped(weights_of(3), Subclass)),
    "not fused": lambda: plan_of(stepped(weights_of(3), fused=False)),
    "amsgrad": lambda: plan_of(stepped(weights_of(3), amsgrad=True)),
    "betas are tensors": lambda: plan_of(changed(stepped(weights_of(3)), betas=(torch.tensor(0.9), 0.99))),
    "no parameter has a gradient": lambda: plan_of(torch.optim.AdamW(weights_of(3), fused=True)),
    "weights are torch.float64": lambda: plan_of(stepped(weights_of(3, dtype=torch.float64))),
    "weights are not dense": lambda: plan_of(stepped(transposed())),
    "gradients are not dense": lambda: plan_of(
        with_gradients(stepped([torch.nn.Parameter(torch.ones(2, 3))]), lambda g: torch.ones(3, 2).t())
    ),
    "moments are not dense": lambda: plan_of(with_state(stepped(weights_of(3)), "exp_avg", torch.Tensor.double)),
    "the size of their weights": lambda: plan_of(with_state(stepped(weights_of(4)), "exp_avg_sq", lambda one: one[:3])),
    "step counters are not float32": lambda: plan_of(with_state(stepped(weights_of(3)), "step", torch.Tensor.double)),
    "the first step makes the state": lambda: plan_of(
        with_gradients(torch.optim.AdamW(weights_of(3), fused=True), lambda _: torch.ones(3))
    ),
    "not on the device of the weights": lambda: plan_of(
        stepped(weights_of(3)), divisor=torch.ones((), device="meta")
    ),
    "does not hold the parameters": lambda: OptimizerPlan(*(lambda o: (o, o.param_groups[0]["params"][:1]))(
        stepped(weights_of(3, 4))
    )),
}  # fmt: skip


@pytest.mark.parametrize(("reason", "make"), LEFT.items(), ids=LEFT.keys())
def test_what_it_does_not_know_is_left_untouched(reason, make):
    """Another step than it knows is refused with the reason, and nothing has changed."""
    plan = make()
    before = snapshot(plan)
    executor = OnePassExecutor()
    assert executor.execute(plan) is False
    assert reason in executor.describe(plan)
    assert all(torch.equal(one, other) for one, other in zip(snapshot(plan), before, strict=True) if one is not None)


def test_without_the_interpreter_tensors_of_a_cpu_are_left(monkeypatch):
    """On a CPU it runs for tests alone: in a user's run the core does the step."""
    monkeypatch.delenv("TRITON_INTERPRET")
    executor = OnePassExecutor()
    plan = plan_of(stepped(weights_of(3)))
    assert executor.execute(plan) is False
    assert "only Triton's interpreter runs" in executor.describe(plan)


def test_an_average_goes_along():
    """A taken average has followed the weights as they are after the step."""
    weights = weights_of(600, 5)
    averages = [torch.zeros(600), torch.ones(5)]
    offer = AverageOffer(averages, weights, 0.25)
    assert OnePassExecutor().execute(plan_of(stepped(weights), averages=(offer,)))
    assert offer.taken
    expected = [torch.zeros(600).lerp(weights[0].detach(), 0.25), torch.ones(5).lerp(weights[1].detach(), 0.25)]
    torch.testing.assert_close(averages, expected, rtol=1e-6, atol=1e-7)


def test_an_average_in_low_precision_goes_along_in_its_accumulators():
    """Accumulators follow exactly, and the average is their rounded value."""
    weights = weights_of(600, dtype=torch.float16)
    accumulators, averages = [torch.zeros(600)], [torch.zeros(600, dtype=torch.float16)]
    offer = AverageOffer(averages, weights, 0.25, accumulators)
    assert OnePassExecutor().execute(plan_of(stepped(weights), averages=(offer,)))
    assert offer.taken
    torch.testing.assert_close(accumulators[0], weights[0].detach().float() * 0.25, rtol=1e-6, atol=1e-7)
    assert torch.equal(averages[0], accumulators[0].half())


NOT_TAKEN = {
    "a weight of another optimizer": lambda w: AverageOffer(
        [torch.ones(4), torch.ones(3)], [w[0], *weights_of(3)], 0.5
    ),
    "a weight twice": lambda w: AverageOffer([torch.ones(4), torch.ones(4)], [w[0], w[0]], 0.5),
    "another size": lambda w: AverageOffer([torch.ones(3)], w[:1], 0.5),
    "float64": lambda w: AverageOffer([torch.ones(4, dtype=torch.float64)], w[:1], 0.5),
    "not contiguous": lambda w: AverageOffer([torch.ones(8)[::2]], w[:1], 0.5),
    "rounded to another dtype": lambda w: AverageOffer([torch.ones(4).half()], w[:1], 0.5, [torch.ones(4)]),
    "accumulators in half": lambda w: AverageOffer([torch.ones(4)], w[:1], 0.5, [torch.ones(4).half()]),
    "nothing": lambda w: AverageOffer([], [], 0.5),
}


@pytest.mark.parametrize("make", NOT_TAKEN.values(), ids=NOT_TAKEN.keys())
def test_an_average_that_does_not_fit_is_not_taken(make):
    """The step is done, the average is left to whoever offered it, whole."""
    weights = weights_of(4)
    offer = make(weights)
    before = copy.deepcopy(offer.averages)
    assert OnePassExecutor().execute(plan_of(stepped(weights), averages=(offer,)))
    assert not offer.taken
    assert all(map(torch.equal, offer.averages, before))


def test_of_two_averages_of_a_weight_the_first_is_taken():
    """One pass has room for one average; an average of other weights has a launch of its own."""
    weights = weights_of(4, 5)
    first, second, third = (
        AverageOffer([torch.ones(w.shape)], [w], share)
        for w, share in zip((weights[0], weights[0], weights[1]), (0.5, 0.1, 0.2), strict=True)
    )
    assert OnePassExecutor().execute(plan_of(stepped(weights), averages=(first, second, third)))
    assert [offer.taken for offer in (first, second, third)] == [True, False, True]
    torch.testing.assert_close(third.averages[0], torch.ones(5).lerp(weights[1].detach(), 0.2))


def test_what_has_moved_is_followed():
    """New gradients, a loaded state and weights at another place are used, not those of the step before."""
    mine, theirs = weights_of(600), weights_of(600)
    first, second = stepped(mine), stepped(theirs)
    executor = OnePassExecutor()
    executor.execute(plan_of(first))
    second.step()
    for optimizer, weights in ((first, mine), (second, theirs)):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        weights[0].data = weights[0].data.clone()
        weights[0].grad = torch.full((600,), -3.0)
    executor.execute(plan_of(first))
    second.step()
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(first.state_dict()["state"], second.state_dict()["state"], rtol=1e-6, atol=1e-6)


def test_other_averages_are_followed():
    """A hook that offers other averages than in the last step has those updated, with the share of this step."""
    weights = weights_of(600)
    optimizer, executor = stepped(weights), OnePassExecutor()
    first, second = AverageOffer([torch.zeros(600)], weights, 0.25), AverageOffer([torch.ones(600)], weights, 0.5)
    assert executor.execute(plan_of(optimizer, averages=(first,)))
    kept = first.averages[0].clone()
    assert executor.execute(plan_of(optimizer, averages=(second,)))
    assert torch.equal(first.averages[0], kept)
    expected = torch.ones(600).lerp(weights[0].detach(), 0.5)
    torch.testing.assert_close(second.averages[0], expected, rtol=1e-6, atol=1e-7)
    assert executor.execute(plan_of(optimizer, averages=(AverageOffer(second.averages, weights, 0.125),)))
    expected.lerp_(weights[0].detach(), 0.125)
    torch.testing.assert_close(second.averages[0], expected, rtol=1e-6, atol=1e-7)


def test_what_has_become_something_else_is_not_followed():
    """In every step it is seen whether gradients and averages are still what the programs can read."""
    weights = weights_of(600)
    weights[0].data = weights[0].data.view(20, 30)
    plan = plan_of(stepped(weights), averages=(AverageOffer([torch.zeros(20, 30)], weights, 0.25),))
    executor, (offer,) = OnePassExecutor(), plan.averages
    assert executor.execute(plan)
    offer.taken = False
    offer.averages[0].data = offer.averages[0].data.double()
    assert executor.execute(plan)
    assert not offer.taken
    weights[0].grad = torch.ones(30, 20).t()
    assert executor.execute(plan) is False


def test_settings_are_those_of_the_step():
    """A learning rate that a scheduler has changed, or a group switched to another rule, counts at once."""
    mine, theirs = weights_of(600), weights_of(600)
    first, second = stepped(mine), stepped(theirs)
    executor = OnePassExecutor()
    for options in ({"lr": 0.5}, {"maximize": True}, {"weight_decay": 0.5, "betas": (0.5, 0.5), "eps": 1e-3}):
        changed(first, **options)
        changed(second, **options)
        assert executor.execute(plan_of(first))
        second.step()
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    assert executor.execute(plan_of(changed(first, amsgrad=True))) is False


def test_no_step_reads_the_device(monkeypatch):
    """The host reads nothing, the first time included, and a step like the last one uploads nothing."""
    weights = weights_of(600, 5)
    offer = AverageOffer([torch.zeros(600), torch.ones(5)], weights, 0.25)
    optimizer = stepped(weights, lr=torch.tensor(0.1))
    plan = plan_of(optimizer, averages=(offer,), divisor=torch.tensor(2.0), veto_flag=torch.tensor(0.0))
    executor = OnePassExecutor()
    with StepCost() as cost:
        assert executor.execute(plan)
        monkeypatch.setattr(torch, "tensor", None)
        assert executor.execute(plan)
    assert cost.host_reads == 0, cost.host_read_sites


def test_under_capture_a_new_plan_is_left(monkeypatch):
    """While a CUDA graph is captured nothing can be uploaded: only a step like the one before is taken."""
    executor, weights = OnePassExecutor(), weights_of(600, 5)
    plan = plan_of(stepped(weights))
    with monkeypatch.context() as patch:
        patch.setattr(onepass, "_capturing", lambda device: True)
        assert executor.execute(plan) is False
        assert "a CUDA graph is being captured" in executor.describe(plan)
    assert executor.execute(plan)
    for weight in weights:
        weight.grad = torch.ones_like(weight)  # elsewhere, as in the memory of a graph
    kept = []
    monkeypatch.setattr(kernels.Tables, "keep", lambda tables: kept.append(tables))
    monkeypatch.setattr(onepass, "_capturing", lambda device: True)
    assert executor.execute(plan_of(plan.optimizer))
    assert len(kept) == 1  # for the graph goes on reading them


def test_a_pickled_executor_begins_anew():
    """Addresses are not carried to another process."""
    executor = OnePassExecutor()
    plan = plan_of(stepped(weights_of(3)))
    assert executor.execute(plan)
    copied = pickle.loads(pickle.dumps(executor))
    assert not copied._memories
    assert copied.execute(plan)


def test_an_optimizer_that_is_gone_leaves_nothing():
    """What is remembered is dropped with its optimizer."""
    executor = OnePassExecutor()
    assert executor.execute(plan_of(stepped(weights_of(3))))
    assert len(executor._memories) == 0


def test_every_device_has_an_answer():
    """Where there are no programs, it says so."""
    assert kernels.obstacle(torch.device("cpu")) == ""
    assert kernels.obstacle(torch.device("meta")) == "there are no programs for tensors on meta"
    assert "interpreter is on" in kernels.obstacle(torch.device("cuda"))
