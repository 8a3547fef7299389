"""Vetoes that are still on the device: folded into one flag, read once, in time."""

from __future__ import annotations

import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import AlwaysVeto, PassThrough, TrainingUpdateHook, decision, window

NAN = float("nan")


class Defer(TrainingUpdateHook):
    """Defers a veto, and looks at the flag of all."""

    reads_grad = False
    defers_veto = True

    def __init__(self, flag, label="defer", priority=50):
        self.flag = torch.as_tensor(flag)
        self.labelled(label)
        self.priority = priority
        self.seen = []

    def before_optimizer_step(self, ctx, *, will_skip):
        ctx.defer_veto(self.flag, f"reason of {self.label}")
        self.seen.append((will_skip, ctx.veto_flag))
        return True


class Decides(TrainingUpdateHook):
    """Does not defer: it wants to know."""

    reads_grad = False

    def __init__(self, label="decides", priority=50):
        self.labelled(label)
        self.priority = priority
        self.seen = []

    def before_optimizer_step(self, ctx, *, will_skip):
        self.seen.append((will_skip, ctx.veto_flag))
        return True


class LateReading(TrainingUpdateHook):
    """Has a number read along with the decision."""

    reads_grad = False
    defers_veto = True

    def before_optimizer_step(self, ctx, *, will_skip):
        self.reading = ctx.read_later(torch.tensor(2.5, dtype=torch.float64))
        return True

    def settled(self, ctx, *, skipped):
        self.value = self.reading.value


class HostReads(TorchDispatchMode):
    """Counts the operations that would wait for a device."""

    WAIT = ("aten._local_scalar_dense", "aten.equal", "aten.is_nonzero", "aten.nonzero", "aten._to_copy.cpu")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += str(func).startswith(self.WAIT)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def reads(monkeypatch):
    """How many tensors were read together, each time that any were."""
    counts = []
    real = decision.read_together

    def counting(tensors):
        if tensors:
            counts.append(len(tensors))
        return real(tensors)

    for module in (decision, window):
        monkeypatch.setattr(module, "read_together", counting)
    return counts


@pytest.mark.parametrize(
    ("flag", "vetoes"),
    [(0.0, False), (1.0, True), (NAN, True), (-2.0, True), (float("inf"), True), (1e-30, True)]
    + [(torch.tensor(value, dtype=dtype), bool(value)) for value in (0, 1) for dtype in (torch.bool, torch.int64)]
    + [(torch.tensor(1e-200, dtype=torch.float64), True), (torch.tensor(2**-24, dtype=torch.float16), True)],
)
def test_non_zero_or_nan_vetoes(make_loop, flag, vetoes):
    """A 0-dim flag of any dtype vetoes when it is non-zero or nan."""
    loop = make_loop(Defer(flag))
    ctx = loop.batch(1.0)
    assert ctx.step_skipped is vetoes
    assert loop.values == [1.0 if vetoes else 0.0]
    assert [tuple(veto) for veto in ctx.outcome.vetoes] == [("defer", "reason of defer")] * vetoes


@pytest.mark.parametrize(
    ("flags", "folded"),
    [
        ((0.0,), 0.0),
        ((3.0,), 1.0),
        ((NAN,), 1.0),
        ((-1.0, 1.0), 1.0),
        ((0.0, 0.0), 0.0),
        ((0.5, NAN), 1.0),
        ((torch.tensor(True), torch.tensor(0)), 1.0),
        ((torch.tensor(1e-200, dtype=torch.float64),), 1.0),
    ],
)
def test_all_flags_fold_into_one(make_loop, flags, folded):
    """All flags fold into one, ``ctx.veto_flag``: float32, 0-dim, exactly 0 or 1."""
    hooks = [Defer(flag, str(place)) for place, flag in enumerate(flags)]
    make_loop(*hooks).batch(1.0)
    (_, flag) = hooks[-1].seen[0]
    assert (flag.dtype, flag.dim(), flag.item()) == (torch.float32, 0, folded)


def test_the_flag_is_none_where_nothing_waits(make_loop):
    """``ctx.veto_flag`` is None where nothing was deferred, and once the host knows."""
    before, after = Decides("before", 10), Decides("after", 60)
    loop = make_loop(before, Defer(1.0, priority=30), after)
    ctx = loop.batch(1.0)
    assert before.seen == [(False, None)]
    assert after.seen == [(True, None)]
    assert ctx.veto_flag is None


def test_it_is_resolved_before_the_first_child_that_does_not_defer(make_loop):
    """A deferred veto is resolved before the first child that does not defer, which is told of it."""
    first, second, last = Defer(1.0, "first", 10), Defer(0.0, "second", 20), Decides("last", 30)
    make_loop(first, second, last).batch(1.0)
    assert [will_skip for will_skip, _ in first.seen + second.seen] == [False, False]  # still on the device
    assert last.seen == [(True, None)]


def test_it_overrides_the_stage_that_is_dispatched(make_loop):
    """A deferred veto counts though its hook returned True, and though no later child decides."""
    loop = make_loop(Defer(1.0))
    loop.batch(1.0)
    assert loop.values == [1.0]
    assert loop.orchestrator.optimizer_step_skipped


def test_defer_veto_is_refused_without_defers_veto(make_loop):
    """A hook without `defers_veto` that defers a veto is a `TypeError` that names it and the remedy."""
    hook = Defer(1.0)
    hook.defers_veto = False
    with pytest.raises(TypeError, match="Defer, whose defers_veto is False.*set `defers_veto = True`"):
        make_loop(hook).batch(1.0)


@pytest.mark.parametrize("flag", [torch.ones(1), torch.ones(2, 2), True, 1.0, None])
def test_a_flag_that_is_no_scalar_tensor(make_loop, flag):
    """A flag that is not a 0-dim tensor is a `TypeError` that says what it is."""
    hook = Defer(0.0)
    hook.flag = flag
    with pytest.raises(TypeError, match="Defer deferred a veto on .*0-dim"):
        make_loop(hook).batch(1.0)


def test_one_read_for_all_flags_and_readings(make_loop, reads):
    """Eager costs at most one host read a step: flags and readings of all hooks are read together."""
    late = LateReading()
    loop = make_loop(Defer(0.0, "a"), Defer(0.0, "b"), late)
    loop.batch(1.0)
    assert reads == [3]
    assert late.value == 2.5


def test_no_read_where_nothing_is_deferred(make_loop, reads):
    """Without flags, readings and scaler nothing is read from the device."""
    loop = make_loop(PassThrough(), AlwaysVeto(), Decides())
    loop.batch(1.0)
    assert reads == []


@pytest.mark.parametrize("kind", ["counting_scaler", "public_scaler", "folding_scaler"])
@pytest.mark.parametrize("deciding", [0, 1, 2])
def test_one_read_with_a_scaler(make_loop, scale, reads, request, kind, deciding):
    """Found-inf of the scaler rides in the same read, also when later children do not defer."""
    scaler = request.getfixturevalue(kind)()
    loop = make_loop(scale(scaler), Defer(0.0, priority=25), *[Decides("x"), Decides("y")][:deciding])
    for _ in range(3):
        loop.batch(1.0)
    assert reads == [2] * 3


def test_the_update_itself_waits_for_nothing(make_loop, scale, divide, folding_scaler):
    """Between the votes and the fused step nothing else waits for the device."""
    loop = make_loop(
        scale(folding_scaler()),
        Defer(0.0, priority=25),
        divide(2.0),
        Decides(),
        weights=(torch.ones(3), torch.ones(2)),
        optimizers=lambda ps: [torch.optim.SGD([p], lr=1.0, fused=True) for p in ps],
    )
    ctx = loop.context()
    loop.orchestrator(ctx, TrainingStage.BEFORE_BATCH)
    ctx.loss = loop.loss(1.0, 1.0)
    loop.orchestrator(ctx, TrainingStage.DO_BACKWARD)
    with HostReads() as waits:
        loop.orchestrator(ctx, TrainingStage.DO_OPTIMIZER_STEP)
        loop.orchestrator(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
    assert loop.values == [[0.5] * 3, [0.5] * 2]
    assert waits.count == 0  # a flag on the host is read without an operation


def test_a_reading_may_be_asked_early(make_loop, reads):
    """A reading that is asked before the common read is read alone, and not again."""

    class Early(LateReading):
        def before_optimizer_step(self, ctx, *, will_skip):
            super().before_optimizer_step(ctx, will_skip=will_skip)
            self.early = self.reading.value
            return True

    early = Early()
    make_loop(early).batch(1.0)
    assert (early.early, early.value) == (2.5, 2.5)
    assert reads == [1]


def test_readings_keep_to_their_own_numbers(make_loop):
    """Several readings, some asked early, each give their own number, beside flags."""

    class Many(TrainingUpdateHook):
        reads_grad = False
        defers_veto = True

        def before_optimizer_step(self, ctx, *, will_skip):
            self.readings = [ctx.read_later(torch.tensor(float(number))) for number in range(5)]
            assert self.readings[2].value == 2.0
            return True

        def settled(self, ctx, *, skipped):
            self.values = [reading.value for reading in self.readings]

    many = Many()
    make_loop(Defer(0.0, "a"), many, Defer(NAN, "b")).batch(1.0)
    assert many.values == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_reading_is_the_number_of_its_moment(make_loop):
    """A reading keeps the value that the tensor had, in double precision where it has it."""

    class Third(LateReading):
        def before_optimizer_step(self, ctx, *, will_skip):
            self.reading = ctx.read_later(torch.tensor(1 / 3, dtype=torch.float64))
            return True

    hook = Third()
    make_loop(hook).batch(1.0)
    assert hook.value == 1 / 3


@pytest.mark.parametrize("method", ["before_batch", "transform_loss", "after_optimizer_step"])
def test_a_deferred_veto_is_never_lost_without_a_word(make_loop, method):
    """A veto deferred outside `before_optimizer_step` counts for the step of its batch, or is refused."""

    def defer(self, ctx, *args, **kwargs):
        ctx.defer_veto(torch.tensor(1.0), "too early or too late")
        return args[0] if args else True

    loop = make_loop(type("Untimely", (TrainingUpdateHook,), {method: defer, "defers_veto": True})())
    for _ in range(2):
        try:
            loop.batch(1.0)
        except (TypeError, RuntimeError) as error:
            assert re.search("deferred? a veto|defer_veto", str(error))  # noqa: PT017 - either way is right
        else:
            assert loop.orchestrator.optimizer_step_skipped
