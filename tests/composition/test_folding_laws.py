"""However an update is carried out, folded or plain, lazy or eager, it comes to the same."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nvalchemi.hooks import TrainContext
from nvalchemi.training import EMAHook, GradientClipHook, GradScalerVetoHook, LossScalingHook, TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator

INF, NAN = float("inf"), float("nan")
OPTIMIZERS = {
    "AdamW": lambda ps, fused: torch.optim.AdamW(ps, lr=1e-2, fused=fused),
    "Adam": lambda ps, fused: torch.optim.Adam(ps, lr=1e-2, amsgrad=True, fused=fused),
    "SGD": lambda ps, fused: torch.optim.SGD(ps, lr=1e-2, fused=fused),
    "SGD momentum": lambda ps, fused: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True, fused=fused),
    "Adagrad": lambda ps, fused: torch.optim.Adagrad(ps, lr=1e-2, fused=fused),
}
HOOKS = {
    "scaling": lambda: LossScalingHook(init_scale=256.0, growth_interval=3),
    "veto": lambda: GradScalerVetoHook(max_consecutive_skips=None),
    "clip": lambda: GradientClipHook(max_norm=0.5),
    "clip each": lambda: GradientClipHook(max_norm=0.5, per_optimizer=True),
    "ema": lambda: EMAHook(decay=0.9),
}


class Reader(TrainingUpdateHook):
    """Reads gradients after everybody else, so that nothing can be folded."""

    priority = 90

    def before_optimizer_step(self, ctx, *, will_skip):
        return True


class Net(nn.Module):
    """Two tied layers, a frozen one, an empty, a 0-dim and an idle parameter."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second, self.frozen = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.factor, self.empty = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 2))
        self.idle = nn.Parameter(torch.ones(2))
        self.to(dtype)

    def forward(self, x):
        return self.second(self.frozen(self.first(x).tanh())).sum() * self.factor + self.empty.sum()


@dataclass(frozen=True)
class Case:
    """What is trained, with what, and what goes wrong when."""

    optimizer: str
    several: bool
    groups: bool
    hooks: tuple[str, ...]
    strikes: tuple[tuple[float, int] | None, ...]
    idle: tuple[bool, ...]

    def train(self, *, fused=True, lazy=False, reader=False, dtype=torch.float32, every=lambda run: None) -> Run:
        run = Run(self, fused, lazy, reader, dtype)
        for number in range(len(self.strikes)):
            run.step(number)
            every(run)
        run.update.resolve()
        return run


class Run:
    """One run of a case."""

    def __init__(self, case: Case, fused: bool, lazy: bool, reader: bool, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.case, self.dtype, self.model = case, dtype, Net(dtype)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        parts: list[Any] = [trained[:2], trained[2:]] if case.several else [trained]
        if case.groups:
            parts = [[{"params": part[:1], "lr": 3e-2}, {"params": part[1:]}] for part in parts]
        self.optimizers = [OPTIMIZERS[case.optimizer](part, fused) for part in parts]
        self.schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in self.optimizers]
        hooks = [HOOKS[name]() for name in case.hooks] + [Reader()] * reader
        self.update = TrainingUpdateOrchestrator(*hooks, lazy=lazy)
        self.inputs = torch.Generator().manual_seed(1)
        self.contexts = []

    def step(self, number: int) -> None:
        case, strike = self.case, self.case.strikes[number]
        x = torch.randn(2, 3, generator=self.inputs, dtype=torch.float64).to(self.dtype)
        # In a lazy run the count may lag: it is asked for only by the first copy of an average, which needs no count.
        with TrainContext(
            models={"main": self.model}, optimizers=self.optimizers, lr_schedulers=self.schedulers, step_count=number
        ) as ctx:
            self.update(ctx, TrainingStage.BEFORE_BATCH)
            # torch's own fused SGD fails on a group in which only some momentum buffers exist.
            busy = case.idle[number] and case.optimizer != "SGD momentum"
            loss = self.model(x).square() + (self.model.idle.sum() if busy else 0.0)
            if strike is not None and set(case.hooks) - {"ema"}:  # without any of the others it would ruin the weights
                kind, place = strike
                trained = [p for p in self.model.parameters() if p.requires_grad and p.numel()]
                loss = loss + trained[place % len(trained)].sum() * kind
            ctx.loss = loss
            self.update(ctx, TrainingStage.DO_BACKWARD)
            self.update(ctx, TrainingStage.DO_OPTIMIZER_STEP)
            self.update(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
        self.contexts.append(ctx)

    def state(self) -> dict[str, Any]:
        """Everything that an update changes."""
        return {
            "weights": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "hooks": self.update.state_dict(),
            "outcomes": [
                (ctx.step_skipped, ctx.outcome.found_inf, ctx.outcome.vetoes, [o[:3] for o in ctx.outcome.optimizers])
                for ctx in self.contexts
            ],
        }


def cases(steps: int, optimizers=tuple(OPTIMIZERS), strikes=(INF, NAN)) -> st.SearchStrategy[Case]:
    strike = st.none() | st.none() | st.none() | st.tuples(st.sampled_from(strikes), st.integers(0, 5))
    hooks = st.sets(st.sampled_from(["scaling", "veto", "clip", "ema"])).map(sorted).map(tuple)
    each = hooks.map(lambda names: tuple("clip each" if name == "clip" else name for name in names))
    return st.builds(
        Case,
        optimizer=st.sampled_from(optimizers),
        several=st.booleans(),
        groups=st.booleans(),
        hooks=hooks | each,
        strikes=st.tuples(*[strike] * steps),
        idle=st.tuples(*[st.booleans()] * steps),
    )


def assert_same(one: Any, other: Any, path: str = "", **tolerance: float) -> None:
    """Assert that two nests of tensors and plain values are equal, by default bit for bit."""
    if isinstance(one, torch.Tensor):
        exact = {"rtol": 0.0, "atol": 0.0, "equal_nan": True}
        torch.testing.assert_close(one, other, **{**exact, **tolerance}, msg=lambda text: f"{path}: {text}")
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}.{key}", **tolerance)
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for place, (first, second) in enumerate(zip(one, other, strict=True)):
            assert_same(first, second, f"{path}[{place}]", **tolerance)
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=tolerance.get("rtol", 0.0), abs=0.0, nan_ok=True), path
    else:
        assert one == other, path


@given(case=cases(8))
@settings(max_examples=40, deadline=None)
def test_lazy_equals_eager_bit_for_bit(case):
    """Weights, moments, averages, scale, counters and learning rates of a lazy run are those of an eager one."""
    assert_same(case.train(lazy=True).state(), case.train(lazy=False).state())


@given(case=cases(6), asked=st.sets(st.integers(0, 5)))
@settings(max_examples=15, deadline=None)
def test_it_does_not_matter_when_somebody_asks(case, asked):
    """A lazy run comes to the same whether its outcome is read at once, later, or never."""

    def ask(run):
        if len(run.contexts) - 1 in asked:
            _ = run.contexts[-1].step_skipped

    assert_same(case.train(lazy=True, every=ask).state(), case.train(lazy=True).state())


@given(case=cases(8))
@settings(max_examples=25, deadline=None)
def test_folded_equals_divided_first(case):
    """With fused optimizers, dividing in the optimizer's own pass is dividing before it, bit for bit."""
    folded, plain = case.train(), case.train(reader=True)
    assert_same(folded.state(), plain.state())


def begin_alike(run: Run, other: Run) -> None:
    """Give `other` the state of `run`."""
    run.update.resolve()
    other.model.load_state_dict(run.model.state_dict())
    for mine, theirs in zip(run.optimizers, other.optimizers, strict=True):
        state = copy.deepcopy(mine.state_dict())
        fused = theirs.param_groups[0]["fused"]
        state["param_groups"] = [{**group, "fused": fused} for group in state["param_groups"]]
        theirs.load_state_dict(state)
    other.update.load_state_dict(run.update.state_dict())


@given(case=cases(6))
@settings(max_examples=15, deadline=None)
def test_one_step_from_equal_state_agrees_with_plain_torch(case):
    """From equal float32 state, a step that is folded and fused agrees with one of plain loops of torch to 1e-6."""
    folded, plain = Run(case, True, True, False, torch.float32), Run(case, False, False, True, torch.float32)
    for number in range(len(case.strikes)):
        begin_alike(folded, plain)
        folded.step(number)
        plain.step(number)
        for one, other in zip(folded.model.parameters(), plain.model.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("optimizer", "several"), [(name, name == "AdamW") for name in OPTIMIZERS])
def test_500_steps_in_double_precision_agree_to_1e_12(optimizer, several):
    """Over 500 random steps with strikes, fused and lazy agree with plain loops of torch to 1e-12 in float64."""
    random = torch.Generator().manual_seed(7)
    draws = torch.randint(0, 40, (500,), generator=random).tolist()
    strikes = tuple((INF if draw else NAN, draw) if draw < 3 else None for draw in draws)
    idle = tuple(draw % 2 == 0 for draw in draws)
    case = Case(optimizer, several, True, ("scaling", "veto", "clip", "ema"), strikes, idle)
    fused = case.train(lazy=True, dtype=torch.float64).state()
    plain = case.train(fused=False, reader=True, dtype=torch.float64).state()
    for part in ("weights", "outcomes"):
        assert_same(fused[part], plain[part], part, rtol=1e-12, atol=1e-12)
    averages = [state["hooks"]["ema[decay=0.9]"]["averaged_model_state"] for state in (fused, plain)]
    assert_same(*averages, rtol=1e-12, atol=1e-12)
    assert sum(skipped for skipped, *_ in fused["outcomes"]) > 5
