"""Who carries out the step of one optimizer: the core's own executor, and those that hooks bring."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from nvalchemi.hooks import ProvidesExecutor, TrainContext, UpdateExecutor
from nvalchemi.training import TrainingStage as S
from nvalchemi.training.hooks import AverageOffer, OptimizerPlan, TrainingUpdateHook, TrainingUpdateOrchestrator
from nvalchemi.training.hooks import executor as executors
from nvalchemi.training.hooks.executor import StockExecutor

OPTIMIZERS = {
    "AdamW": lambda ps, **o: torch.optim.AdamW(ps, lr=0.1, fused=True, **o),
    "AdamW amsgrad": lambda ps, **o: torch.optim.AdamW(ps, lr=0.1, fused=True, amsgrad=True, maximize=True, **o),
    "Adam": lambda ps, **o: torch.optim.Adam(ps, lr=0.1, weight_decay=0.1, fused=True, **o),
    "Adam decoupled": lambda ps, **o: torch.optim.Adam(
        ps, lr=0.1, weight_decay=0.1, decoupled_weight_decay=True, fused=True, **o
    ),
    "SGD": lambda ps, **o: torch.optim.SGD(ps, lr=0.1, weight_decay=0.1, fused=True, **o),
    "SGD momentum": lambda ps, **o: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, fused=True, **o),
    "Adagrad": lambda ps, **o: torch.optim.Adagrad(ps, lr=0.1, lr_decay=0.1, fused=True, **o),
}


def parameters(*shapes):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]


def give(ps, number):
    """Give every parameter that trains a gradient, the same at each call with one number."""
    torch.manual_seed(number)
    for parameter in ps:
        parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None


def with_gradient(ps):
    return [parameter for parameter in ps if parameter.grad is not None]


@pytest.fixture
def through_step(monkeypatch):
    """Count the steps that go through the optimizers' own ``step()``."""
    counted, real = [], executors._step_through

    def step(optimizer, plan):
        counted.append(type(optimizer).__name__)
        real(optimizer, plan)

    monkeypatch.setattr(executors, "_step_through", step)
    return counted


def assert_same(one, other):
    torch.testing.assert_close(one[0], other[0], rtol=0, atol=0)
    torch.testing.assert_close(one[1].state_dict(), other[1].state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_it_is_the_optimizers_own_step_to_the_bit(make, through_step):
    """Ten steps of the stock executor equal ten of ``step()`` bit for bit; only the first goes through ``step()``."""
    shapes = [(3,), (2, 2), (), (0, 2)]
    own, theirs = parameters(*shapes), parameters(*shapes)
    ours, torchs = make(own), make(theirs)
    stock, kept = StockExecutor(), None
    for number in range(10):
        give(own, number)
        give(theirs, number)
        kept = kept or with_gradient(own)
        assert stock.execute(OptimizerPlan(ours, kept))
        torchs.step()
    assert_same((own, ours), (theirs, torchs))
    assert len(through_step) == 1


def adam_steps(monkeypatch, *, private, ps=None, **options):
    """Weights and state after four steps of AdamW, and how many of them went through torch's public form."""
    public, real = [], executors.adamw.adamw
    with monkeypatch.context() as patch:
        patch.setattr(executors.adamw, "adamw", lambda *given, **more: public.append(1) or real(*given, **more))
        if not private:
            patch.setattr(executors.fused_adam, "agrees", lambda decoupled: False)
        ps = parameters((3,), (2, 5), (), (0,)) if ps is None else ps()
        optimizer, executor = torch.optim.AdamW(ps, fused=True, **options), StockExecutor()
        for number in range(4):
            give(ps, number)
            plan = OptimizerPlan(optimizer, ps, torch.tensor(3.0), torch.tensor(float(number == 2)) if number else None)
            assert executor.execute(plan)
    return ps, optimizer, len(public)


@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "maximize": True, "weight_decay": 0.2}])
def test_the_private_operation_has_the_bits_of_the_public_form(monkeypatch, options):
    """Adam's kernel called by itself, divisor and veto included, comes to what torch's functional form comes to."""
    *direct, public = adam_steps(monkeypatch, private=True, **options)
    *through, counted = adam_steps(monkeypatch, private=False, **options)
    assert (public, counted) == (0, 3)  # the first step goes through step()
    assert_same(direct, through)


def test_tensors_of_several_kinds_and_settings_on_a_device_go_through_the_public_form(monkeypatch):
    """It sorts by device and dtype, and moves a learning rate that is a tensor; the private operation does neither."""
    mixed = lambda: [*parameters((3,)), torch.nn.Parameter(torch.zeros(2)[1:].as_subclass(Marked))]  # noqa: E731
    assert adam_steps(monkeypatch, private=True, ps=mixed)[2] == 3
    assert adam_steps(monkeypatch, private=True, lr=torch.tensor(0.1))[2] == 3


class Marked(torch.Tensor):
    """A subclass of tensors that changes nothing."""


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_divisor_and_veto_go_along(make):
    """A divisor divides first; a veto of 1 leaves weights, state and counters bit for bit, and 0 changes nothing."""
    own, theirs = parameters((3,), (2,)), parameters((3,), (2,))
    ours, torchs = make(own), make(theirs)
    stock, vetoed = StockExecutor(), [0, 1, 1, 0, 1, 0]
    kept = own
    for number, veto in enumerate(vetoed):
        give(own, number)
        give(theirs, number)
        before = copy.deepcopy((own, ours.state_dict()))
        flag = torch.tensor(float(veto)) if number else None
        assert stock.execute(OptimizerPlan(ours, kept, torch.tensor(8.0), flag))
        if veto:
            torch.testing.assert_close((own, ours.state_dict()), before, rtol=0, atol=0)
        else:
            for parameter in theirs:
                parameter.grad /= 8.0
            torchs.step()
    assert_same((own, ours), (theirs, torchs))


def veto_step(stock, optimizer, ps):
    return stock.execute(OptimizerPlan(optimizer, ps, None, torch.ones(())))


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_veto_needs_a_state_to_be_left_alone(make):
    """Under a veto on the device an optimizer that has not stepped is refused, untouched."""
    ps = parameters((3,))
    optimizer = make(ps)
    give(ps, 0)
    before = copy.deepcopy((ps, optimizer.state_dict()))
    assert not veto_step(StockExecutor(), optimizer, ps)
    torch.testing.assert_close((ps, optimizer.state_dict()), before, rtol=0, atol=0)


def changed(change):
    """Train two equal optimizers, change both in the middle, and compare the ends."""
    ends = []
    for ours in (True, False):
        ps = parameters((3,), (2,), (2, 2))
        optimizer = torch.optim.AdamW([{"params": ps[:2]}, {"params": ps[2:], "lr": 0.3}], lr=0.1, fused=True)
        orchestrator, own = TrainingUpdateOrchestrator(), list(ps)
        for number in range(8):
            if number == 4:
                change(optimizer, own)
            give(own, number)
            if ours:
                with TrainContext(optimizers=[optimizer]) as ctx:
                    orchestrator(ctx, S.DO_OPTIMIZER_STEP)
            else:
                optimizer.step()
        ends.append((own, optimizer))
    assert_same(*ends)


def load(optimizer, ps):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for state in optimizer.state.values():
        state["exp_avg"].mul_(2.0)


def add_group(optimizer, ps):
    ps.append(torch.nn.Parameter(torch.ones(2)))
    optimizer.add_param_group({"params": [ps[-1]], "lr": 0.5})


def change_settings(optimizer, ps):
    optimizer.param_groups[0].update(lr=0.7, betas=(0.5, 0.6), weight_decay=0.3, eps=1e-3)


def freeze(optimizer, ps):
    ps[0].requires_grad_(False)


def replace_moments(optimizer, ps):
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"] * 2.0


def replace_states(optimizer, ps):
    for parameter in ps:
        optimizer.state[parameter] = copy.deepcopy(optimizer.state[parameter])
        optimizer.state[parameter]["exp_avg_sq"].mul_(3.0)


def forget_state(optimizer, ps):
    optimizer.state.clear()


def forget_some_state(optimizer, ps):
    del optimizer.state[ps[1]]


def replace_parameter(optimizer, ps):
    del optimizer.state[ps[1]]
    ps[1] = optimizer.param_groups[0]["params"][1] = torch.nn.Parameter(torch.ones(2))


def swap_data(optimizer, ps):
    ps[0].data = torch.full_like(ps[0], 7.0)


def begin_amsgrad(optimizer, ps):
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["amsgrad"] = True


def go_unfused(optimizer, ps):
    for group in optimizer.param_groups:
        group.update(fused=False, foreach=False)


@pytest.mark.parametrize(
    "change",
    [
        load, add_group, change_settings, freeze, replace_moments, replace_states, forget_state, forget_some_state,
        replace_parameter, swap_data, begin_amsgrad, go_unfused,
    ],
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_what_has_changed_is_noticed(change):
    """After any change of groups, settings, state or parameters the steps are those of ``step()``, bit for bit."""
    changed(change)


def test_gradients_that_come_and_go_are_noticed():
    """A parameter without a gradient stays as it is, whichever it is from step to step."""
    ends = []
    for ours in (True, False):
        ps = parameters((3,), (2,), (2, 2))
        optimizer, stock = torch.optim.AdamW(ps, lr=0.1, fused=True), StockExecutor()
        for number in range(9):
            give(ps, number)
            if number > 2:
                ps[number % 3].grad = None
            if ours:
                assert stock.execute(OptimizerPlan(optimizer, with_gradient(ps)))
            else:
                optimizer.step()
        ends.append((ps, optimizer))
    assert_same(*ends)


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook", "global", "patched"])
def test_code_around_the_step_is_called(register):
    """Step hooks and a patched ``step()`` are called at every step, and refuse a veto on the device."""
    ps, calls = parameters((3,)), []
    optimizer, stock = torch.optim.AdamW(ps, lr=0.1, fused=True), StockExecutor()
    for number in range(2):
        give(ps, number)
        stock.execute(OptimizerPlan(optimizer, ps))
    handle = None
    if register == "patched":
        real = optimizer.step
        optimizer.step = lambda: (calls.append(1), real())
    elif register == "global":
        handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    else:
        getattr(optimizer, register)(lambda *_: calls.append(1))
    try:
        for number in range(2, 4):
            give(ps, number)
            if not stock.execute(OptimizerPlan(optimizer, ps)):
                optimizer.step()
        assert not veto_step(stock, optimizer, ps)
    finally:
        if handle is not None:
            handle.remove()
    assert calls == [1, 1]


def test_a_scheduler_sees_that_the_optimizer_has_stepped(recwarn):
    """A scheduler made at any time finds that a step came before its own: it never warns."""
    ps = parameters((3,))
    optimizer, stock = torch.optim.AdamW(ps, lr=0.1, fused=True), StockExecutor()
    for number in range(3):
        give(ps, number)
        assert stock.execute(OptimizerPlan(optimizer, ps))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for number in range(3):
        give(ps, number)
        assert stock.execute(OptimizerPlan(optimizer, ps))
        scheduler.step()
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda ps: torch.optim.AdamW(ps), torch.float32),
        (lambda ps: torch.optim.RMSprop(ps), torch.float32),
        (lambda ps: torch.optim.SGD(ps, lr=0.1, fused=True), torch.bfloat16),
        (lambda ps: torch.optim.SGD(ps, lr=0.1, fused=True), torch.float16),
        (lambda ps: torch.optim.AdamW(ps, fused=True), torch.float64),
    ],
)
def test_what_it_cannot_fold_it_leaves_alone(make, dtype):
    """An optimizer that is not fused, or whose gradients are not float32 (trap: fused SGD in bf16), is refused."""
    parameter = torch.nn.Parameter(torch.ones(40, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    optimizer = make([parameter])
    assert not StockExecutor().execute(OptimizerPlan(optimizer, [parameter], torch.tensor(2.0)))
    assert torch.equal(parameter, torch.ones_like(parameter))
    assert torch.equal(parameter.grad, torch.ones_like(parameter))


def test_its_lists_are_left_behind_by_pickle():
    """An executor that has kept lists pickles, empty."""
    ps = parameters((3,))
    optimizer, stock = torch.optim.AdamW(ps, fused=True), StockExecutor()
    give(ps, 0)
    stock.execute(OptimizerPlan(optimizer, ps))
    assert not pickle.loads(pickle.dumps(stock))._kept


class Brings(TrainingUpdateHook):
    """Brings an executor that takes what it is told to take."""

    reads_grad = False

    def __init__(self, takes, label="brings"):
        self.takes, self.plans, self.asked = takes, [], 0
        self.labelled(label)

    def update_executor(self):
        self.asked += 1
        return self

    def execute(self, plan):
        self.plans.append(plan)
        if self.takes:
            for parameter in plan.parameters:
                parameter.data.sub_(1.0)
            for offer in plan.averages:
                offer.taken = True
        return self.takes


class Offers(TrainingUpdateHook):
    """Offers an average of one parameter."""

    reads_grad = False
    defers_veto = True

    def __init__(self, parameter):
        self.parameter, self.average = parameter, parameter.detach().clone()
        self.offer, self.taken = None, []

    def before_optimizer_step(self, ctx, *, will_skip):
        self.offer = ctx.offer_average([self.average], [self.parameter], 0.5)
        return True

    def after_optimizer_step(self, ctx, *, skipped):
        self.taken.append(None if self.offer is None else self.offer.taken)


def test_hooks_bring_executors_by_protocol():
    """A hook with ``update_executor`` is asked once, when it is composed, and what it brings fits the protocol."""
    hook = Brings(True)
    assert isinstance(hook, ProvidesExecutor)
    assert isinstance(StockExecutor(), UpdateExecutor)
    orchestrator = TrainingUpdateOrchestrator(hook)
    assert hook.asked == 1
    assert next(orchestrator.iter_hooks()) is hook


def test_executors_are_asked_in_order_until_one_takes_the_step(make_loop):
    """Executors are asked in the order of their hooks; the first that takes the step is the last to be asked."""
    first, second, third = Brings(False, "first"), Brings(True, "second"), Brings(True, "third")
    loop = make_loop(first, second, third, optimizers=lambda ps: [torch.optim.AdamW(ps, lr=1.0, fused=True)])
    loop.batch(1.0)
    assert [len(hook.plans) for hook in (first, second, third)] == [1, 1, 0]
    assert loop.values == [0.0]
    assert loop.orchestrator.last_outcome.optimizers[0].division == "folded by Brings"


def test_the_core_steps_where_no_executor_does(make_loop):
    """If no executor takes the step, the optimizer steps as always."""
    loop = make_loop(Brings(False), optimizers=lambda ps: [torch.optim.SGD(ps, lr=0.25)])
    loop.batch(1.0)
    assert loop.values == [0.75]


def test_an_average_is_offered_only_where_somebody_might_take_it(make_loop):
    """`ctx.offer_average` is None without an executor; else the executor finds the offer in the plan and takes it."""
    sgd = lambda ps: [torch.optim.SGD(ps, lr=0.25)]  # noqa: E731
    alone = make_loop(optimizers=sgd)
    hook = Offers(alone.parameters[0])
    alone.orchestrator = TrainingUpdateOrchestrator(hook)
    alone.batch(1.0)
    assert hook.taken == [None]
    for takes in (False, True):
        loop = make_loop(optimizers=sgd)
        hook, executor = Offers(loop.parameters[0]), Brings(takes)
        loop.orchestrator = TrainingUpdateOrchestrator(hook, executor)
        loop.batch(1.0)
        assert hook.taken == [takes]
        (offer,) = executor.plans[0].averages
        assert isinstance(offer, AverageOffer)
        assert (offer.averages, offer.live, offer.weight) == ([hook.average], [loop.parameters[0]], 0.5)


def test_no_executor_gets_around_step_hooks_or_a_scaler_of_its_own(make_loop, scale, counting_scaler):
    """Where ``step()`` must be called, because of step hooks or torch's scaler, no executor is asked."""
    hooked = make_loop(Brings(True), optimizers=lambda ps: [torch.optim.SGD(ps, lr=0.25)])
    hooked.optimizers[0].register_step_pre_hook(lambda *_: None)
    hooked.batch(1.0)
    assert hooked.values == [0.75]
    scaled = make_loop(Brings(True), scale(counting_scaler()), optimizers=lambda ps: [torch.optim.SGD(ps, lr=0.25)])
    scaled.batch(1.0)
    assert scaled.values == [0.75]


def test_reasons_name_what_stands_in_the_way():
    """`why_not_folded` names the first obstacle."""
    ps = parameters((3,))
    assert executors.why_not_folded(torch.optim.AdamW(ps), []) == "the optimizer is not fused"
    assert executors.why_not_folded(torch.optim.AdamW(ps, fused=True), [torch.ones(1).half()]) == (
        "gradients are not float32"
    )
    assert executors.why_not_folded(torch.optim.AdamW(ps, fused=True), [torch.ones(1)]) == ""
