"""Entries 1 to 13: averages of weights, and what becomes of them on the way to disk and back."""

from __future__ import annotations

import math
import time
import warnings

import pytest
import torch
from torch import nn

from nvalchemi.hooks import TrainContext
from nvalchemi.testing import StepCost, TinyModel, tiny_batches
from nvalchemi.training import TrainingStage

HALF = [torch.bfloat16, torch.float16]
WAYS = [
    pytest.param({}, id="plain"),
    pytest.param({"lazy": True}, id="lazy"),
    pytest.param({"options": {"lr": 0.5, "fused": True}}, id="folded"),
    pytest.param({"options": {"lr": 0.5, "fused": True}, "lazy": True}, id="folded, lazy"),
]
OPTIMIZERS = [
    pytest.param({"optimizer": "SGD", "options": {"lr": 0.05, "momentum": 0.9}}, id="momentum"),
    pytest.param({"optimizer": "SGD", "options": {"lr": 0.05, "momentum": 0.9, "fused": True}}, id="folded momentum"),
    pytest.param({"optimizer": "AdamW", "options": {"lr": 0.05}}, id="AdamW"),
    pytest.param({"optimizer": "AdamW", "options": {"lr": 0.05, "fused": True}}, id="folded AdamW"),
    pytest.param({"optimizer": "AdamW", "options": {"lr": 0.05, "fused": True}, "lazy": True}, id="folded AdamW, lazy"),
]


def square_error(predictions, batch):
    """The loss of the tiny model."""
    return (predictions - batch[1]).square().mean()


class Tiny(TinyModel):
    """The tiny model; its batches carry the target along."""

    def forward(self, batch):
        return super().forward(batch[0])


def seeded(dtype=torch.float32) -> Tiny:
    """The same tiny model at each call."""
    torch.manual_seed(3)
    return Tiny().to(dtype)


def written(module: nn.Module) -> str:
    """Every bit of a module's tensors, to be compared."""
    return repr([(name, tensor.double().tolist()) for name, tensor in module.state_dict().items()])


@pytest.mark.fault(naive="RebuildsTheAverageOnResume", shows="1.0 == 0.009")
@pytest.mark.parametrize("how", WAYS)
def test_a01_a_resumed_average_is_blended_and_not_begun_anew(way, point, how, tmp_path):
    """The first update after a resume weighs the old average as every other does.

    Old average 0, live 1, decay 0.991: 0.991 * 0 + 0.009 * 1 = 0.009. A fresh average would copy the 1.
    """
    run = way(point(w=0.0), ema={"decay": 0.991}, **how)
    run.step({"w": 0.0})
    run.save(tmp_path / "saved")
    run = way(point(w=5.0), ema={"decay": 0.991}, **how)
    run.load(tmp_path / "saved")
    run.step({"w": -1.0 / run.lr})
    assert round(run.shadow.w.item(), 6) == 0.009
    assert run.updates == 2


@pytest.mark.fault(naive="RebuildsTheAverageOnResume", shows="(10, ")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", OPTIMIZERS)
def test_a01_stopping_in_between_changes_no_bit_of_the_average(way, how, dtype, tmp_path):
    """20 steps are 10 steps, a save, a load and 10 steps: counter, average and weights are the same, bit for bit."""
    if dtype is not torch.float32:
        how = {**how, "options": {**how["options"], "fused": False}}
    given = {"loss": square_error, "ema": {"decay": 0.9}, **how}
    batches = tiny_batches(20, dtype=dtype)
    straight, first, second = (way(seeded(dtype), **given) for _ in range(3))
    for batch in batches:
        straight.step(batch)
    for batch in batches[:10]:
        first.step(batch)
    first.save(tmp_path / "saved")
    second.load(tmp_path / "saved")
    for batch in batches[10:]:
        second.step(batch)
    one, other = ((run.updates, written(run.shadow), written(run.live)) for run in (second, straight))
    assert one == other


@pytest.mark.parametrize("settings", [{"update_every": 3}, {"start_step": 7}, {"use_buffers": False}])
def test_a01_a_schedule_goes_on_where_it_was(ours, settings, tmp_path):
    """The rhythm of updates is that of the whole run, wherever it was stopped, and whichever was set up first."""
    given = {"loss": square_error, "ema": {"decay": 0.9, **settings}, "options": {"lr": 0.05}}
    batches = tiny_batches(11)
    straight = ours(seeded(), **given)
    for batch in batches:
        straight.step(batch)
    for stop in (2, 5):
        for set_up in (False, True):
            first, second = ours(seeded(), **given), ours(seeded(), **given)
            for batch in batches[:stop]:
                first.step(batch)
            first.save(tmp_path / "saved")
            if set_up:
                second.strategy.setup()
            second.load(tmp_path / "saved")
            for batch in batches[stop:]:
                second.step(batch)
            assert (second.updates, written(second.shadow)) == (straight.updates, written(straight.shadow))


@pytest.mark.fault(naive="SwapsWeightsIn", shows="(1.0, 1.0) == (3.0, 1.0)")
@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("how", WAYS)
def test_a02_a_checkpoint_holds_live_as_live_also_while_averages_are_evaluated(way, point, how, raises, tmp_path):
    """A checkpoint that is taken inside an evaluation of the average holds both copies, each as what it is.

    Live -1, then 3, decay 0.5: the average is -1, then 1. One step further, gradient 1: 3 minus the learning rate.
    """
    place = tmp_path / "saved"
    evaluating = False

    def loss(predictions, batch):
        if evaluating:
            run.save(place)
            if raises:
                raise ZeroDivisionError
        return predictions

    run = way(point(w=0.0), loss=loss, ema={"decay": 0.5}, **how)
    for gradient in (1.0, -4.0):
        run.step({"w": gradient / run.lr})
    evaluating = True
    try:
        run.evaluate([{"w": 1.0}])
    except ZeroDivisionError:
        assert raises
    evaluating = False
    resumed = way(point(w=9.0), ema={"decay": 0.5}, **how)
    resumed.load(place)
    for one in (run, resumed):
        assert (one.live.w.item(), resumed.average_of("w")) == (3.0, 1.0)
    resumed.step({"w": 1.0})
    assert resumed.live.w.item() == 3.0 - resumed.lr


@pytest.mark.fault(naive="SavesOneCopy", shows="live and average")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", OPTIMIZERS)
def test_a03_both_copies_are_saved(way, how, dtype, tmp_path):
    """After a load live weights, average and optimizer state are those that were saved, and 10 steps are 5 and 5."""
    if dtype is not torch.float32:
        how = {**how, "options": {**how["options"], "fused": False}}
    given = {"loss": square_error, "ema": {"decay": 0.9}, **how}
    batches = tiny_batches(10, dtype=dtype)
    straight, first, second = (way(seeded(dtype), **given) for _ in range(3))
    for batch in batches:
        straight.step(batch)
    for batch in batches[:5]:
        first.step(batch)
    first.save(tmp_path / "saved")
    second.load(tmp_path / "saved")
    assert written(second.live) == written(first.live), "live and average are one"
    for batch in batches[5:]:
        second.step(batch)
    assert written(second.live) == written(straight.live)
    assert written(second.shadow) == written(straight.shadow) != written(straight.live)
    assert str(second.optimizers[0].state_dict()) == str(straight.optimizers[0].state_dict())


def normalising() -> nn.Sequential:
    """A model with a parameter, two averaged buffers and a counted one."""
    return nn.Sequential(nn.BatchNorm1d(2))


def shifted(count: int) -> list[torch.Tensor]:
    """Batches with mean 5."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 2, generator=generator) + 5 for _ in range(count)]


@pytest.mark.fault(naive="AveragesParametersOnly", shows="[0.0, 0.0] == [")
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_a04_copied_buffers_are_those_of_the_live_model(way, lazy):
    """With copied buffers the statistics of the average are those of the live model, exactly."""
    run = way(normalising(), loss=lambda y, _: y.sum(), ema={"decay": 0.9, "use_buffers": False}, lazy=lazy)
    for batch in shifted(3):
        run.step(batch)
    assert run.shadow[0].running_mean.tolist() == run.live[0].running_mean.tolist()
    assert run.shadow[0].running_var.tolist() == run.live[0].running_var.tolist()


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_a04_averaged_buffers_follow_the_live_model(ours, lazy):
    """By default statistics are averaged as weights are: a copy, then decay times old and the rest new."""
    run = ours(normalising(), loss=lambda y, _: y.sum(), ema={"decay": 0.5}, lazy=lazy)
    expected = None
    for batch in shifted(4):
        run.step(batch)
        live = run.live[0].running_mean.clone()
        expected = live if expected is None else 0.5 * expected + 0.5 * live
    torch.testing.assert_close(run.shadow[0].running_mean, expected)


@pytest.mark.fault(naive="AveragesIntegers", shows="(1, torch.int64) == (5, torch.int64)")
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("use_buffers", [True, False])
def test_a05_whole_numbers_are_copied(way, use_buffers, lazy):
    """A buffer that counts batches has, in the average too, the value and the dtype it has in the live model."""
    settings = {"decay": 0.9, "use_buffers": use_buffers} if use_buffers is False else {"decay": 0.9}
    run = way(normalising(), loss=lambda y, _: y.sum(), ema=settings, lazy=lazy)
    for batch in shifted(5):
        run.step(batch)
    counted = run.shadow[0].num_batches_tracked
    assert (counted.item(), counted.dtype) == (5, torch.int64)


@pytest.mark.fault(naive="AveragesInHalfPrecision", shows="1.0 == 1.632")
@pytest.mark.parametrize(
    ("dtype", "lazy"),
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False), (torch.float32, False)],
)
def test_a06_averages_of_half_precision_weights_move(way, point, dtype, lazy):
    """1000 updates at a decay of 0.999 carry the average from 1 towards 2 in any dtype: 2 - 0.999**1000 = 1.6323."""
    model = point(w=torch.ones((), dtype=dtype))
    run = way(model, ema={"decay": 0.999}, lazy=lazy)
    for gradient in [0.0, -1.0] + [0.0] * 999:
        run.step({"w": gradient})
    assert run.live.w.item() == 2.0
    rounding = 0.0 if dtype is torch.float32 else torch.finfo(dtype).eps  # half a unit between 1 and 2 is eps / 2
    assert run.shadow.w.item() == pytest.approx(1.6323, abs=1e-3 + rounding)


@pytest.mark.parametrize("dtype", HALF)
def test_a06_what_is_behind_the_rounded_average_is_saved(ours, point, dtype, tmp_path):
    """The float32 accumulator survives a checkpoint, so that 400 updates are 200 and 200, to the last bit."""

    def begun(count):
        run = ours(point(w=torch.ones((), dtype=dtype)), ema={"decay": 0.999})
        for gradient in [0.0, -1.0] + [0.0] * (count - 1):
            run.step({"w": gradient})
        return run

    straight = begun(400)
    begun(200).save(tmp_path / "saved")
    resumed = ours(point(w=torch.ones((), dtype=dtype)), ema={"decay": 0.999})
    resumed.load(tmp_path / "saved")
    for _ in range(200):
        resumed.step({"w": 0.0})
    one, other = (run.hook("ema").state_dict()["accumulators"] for run in (straight, resumed))
    assert torch.equal(one["w"], other["w"])
    assert one["w"].item() == pytest.approx(2 - 0.999**400, abs=1e-5)


class Caching(nn.Module):
    """A module that stores what it returned last, graph and all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        self.last = self.layer(x)
        return self.last


def weight_normed() -> nn.Module:
    """A layer whose weight is computed, and stored with its graph."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(2, 2))


@pytest.mark.fault(
    naive="CopiesAtTheFirstUpdate", raises=RuntimeError, shows="created explicitly by the user", careful=False
)
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used before"])
@pytest.mark.parametrize(
    "make", [weight_normed, Caching, lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))],
    ids=["weight norm", "cached output", "parametrized"],
)  # fmt: skip
def test_a07_models_that_hold_computed_tensors_are_averaged(way, make, used):
    """A model with tensors that carry a graph is copied, also where it ran before; the average follows it."""
    model = make()
    if used or way.__name__ != "Run":
        model(torch.ones(1, 2))
    run = way(model, loss=lambda y, _: y.sum(), ema={"decay": 0.5}, options={"lr": 0.1})
    before = written(model)
    for _ in range(3):
        run.step(torch.ones(1, 2))
    assert run.updates == 3
    assert written(run.shadow) not in (before, written(model))


def test_a07_what_cannot_be_copied_is_named_before_the_first_batch(ours):
    """The attribute that refuses is named, with the way out, before a batch is read."""
    model = Caching()
    model.lock = (one for one in ())
    run = ours(model, loss=lambda y, _: y.sum(), ema={})
    with pytest.raises(RuntimeError, match=r"'lock'.*_build_averaged_model"):
        run.epoch(iter([1 / 0 for _ in ()]))


def line() -> nn.Linear:
    """A weight of 0."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def follow(way, wrap, first):
    """Prime an average at 0, move the live weight to 1, and wrap the model before or after it is first seen."""
    bare = line()
    run = way(wrap(bare) if first else bare, loss=lambda y, _: -y.sum(), ema={"decay": 0.5})
    run.step(torch.zeros(1, 1))
    if not first:
        run.wrap(wrap)
    run.step(torch.ones(1, 1))
    assert bare.weight.item() == 1.0
    return run, bare


@pytest.mark.fault(naive="MatchesNames", shows="0.0 == 0.5", careful=False)
@pytest.mark.parametrize("first", [False, True], ids=["compiled later", "compiled first"])
def test_a08_compiling_the_model_changes_nothing_for_its_average(way, first):
    """The average of a compiled model is that of the model: the same numbers, under the same names."""
    run, bare = follow(way, lambda model: torch.compile(model, backend="eager"), first)
    assert run.shadow.weight.item() == 0.5
    names = run.strategy.state_dict()["hooks"]["ema[decay=0.5]"]["state"]["averaged_model_state"]
    assert not [name for name in names if "_orig_mod" in name]
    bare.load_state_dict(run.shadow.state_dict(), strict=True)


@pytest.mark.fault(naive="ExpectsTheModelAsItWas", raises=KeyError, shows="weight", careful=False)
@pytest.mark.parametrize("first", [False, True], ids=["wrapped later", "wrapped first"])
def test_a09_the_order_of_wrapping_does_not_matter(way, first):
    """A model that is wrapped for several devices before or after the average was built gives it the same numbers."""
    run, bare = follow(way, nn.DataParallel, first)
    assert run.shadow.weight.item() == 0.5
    bare.load_state_dict(run.shadow.state_dict(), strict=True)


def test_a09_a_child_called_module_is_no_wrapper(ours):
    """A model of the user's own with an attribute ``module`` is averaged whole, under its own names."""

    class Mine(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(1, 1)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.module(x) * self.scale

    run = ours(Mine(), loss=lambda y, _: y.sum(), ema={})
    run.step(torch.ones(1, 1))
    assert set(run.shadow.state_dict()) == {"module.weight", "module.bias", "scale"}


@pytest.mark.fault(naive="AveragesEveryMicroBatch", shows="1.46875 == 1.25")
@pytest.mark.parametrize("how", WAYS)
def test_a10_the_average_follows_steps_and_not_batches(way, point, how):
    """Two windows of four batches are two updates.

    Live 1, then 2, average 0, decay 0.5: 0.5, then 1.25. After each batch: 0, 0, 0, 0.5, 0.75, ... it is 1.46875.
    """
    run = way(point(w=0.0), ema={"decay": 0.5}, accumulate={"steps": 4}, **how)
    run.prime_average()
    for _ in range(8):
        run.step({"w": -1.0 / run.lr})
    assert run.shadow.w.item() == 1.25


@pytest.mark.fault(naive="NeverCallsTheUpdate", shows="0 == 3")
@pytest.mark.parametrize("how", WAYS)
def test_a11_every_step_is_an_update(way, point, how):
    """After three steps the average has been updated three times, and is not what it was at first."""
    run = way(point(w=0.0), ema={"decay": 0.5}, **how)
    for _ in range(3):
        run.step({"w": -1.0 / run.lr})
    assert run.updates == run.steps == 3
    assert run.shadow.w.item() == 2.25


def test_a11_a_run_that_never_updates_its_average_is_told_of(ours, point):
    """At the end of a run with steps and no update a warning says which settings kept it from one."""
    run = ours(point(w=0.0), ema={"decay": 0.5, "start_step": 100})
    with pytest.warns(UserWarning, match=r"3 executed steps.*start_step=100"):
        run.epoch([{"w": -1.0}] * 3)


@pytest.mark.fault(ours="Sharded", naive="SavesItsOwnShard", shows="3 == 5", needs=["ema"])
def test_a12_the_average_of_a_sharded_model_is_whole(way, two_ranks):
    """On two ranks, with three of five elements on one, the gathered average is that of one process.

    Live 0 to 4, then 1 to 5, then 2 to 6, decay 0.75: 0.25 more after the second, and 0.25 * 1.75 more after the third.
    """
    for rank in two_ranks(way.job):
        assert len(rank["average"]) == 5
        assert rank["average"] == [element + 0.25 + 0.25 * 1.75 for element in range(5)]


@pytest.mark.fault(naive="AveragesTensorByTensor", shows="a multi-tensor operation", careful=False)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_a13_an_update_is_a_few_operations_however_many_tensors(way, point, dtype, lazy):
    """2000 tensors are averaged in a few multi-tensor operations on their own device, and nothing is read for it."""
    model = point(w=torch.zeros((), dtype=dtype))
    model.others = nn.ParameterList([nn.Parameter(torch.zeros(10, dtype=dtype)) for _ in range(2000)])
    run = way(model, spread="first", ema={"decay": 0.5}, lazy=lazy)
    for _ in range(3):
        run.step({"w": 1.0})
    with StepCost() as cost:
        run.step({"w": 1.0})
    assert cost.ops < 100, "a multi-tensor operation is one for all"


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("check", [False, True])
def test_a13_a_step_asks_for_the_scale_at_most_once(ours, point, monkeypatch, how, check):
    """Whatever is composed, a scaler of torch's is asked for its scale once a step at most."""
    asked = []
    real = torch.amp.GradScaler.get_scale
    monkeypatch.setattr(torch.amp.GradScaler, "get_scale", lambda self: asked.append(1) or real(self))
    run = ours(point(w=1.0), ema={}, clip={}, check=check, torch_scaler={"init_scale": 8.0}, **how)
    for gradient in (1.0, math.inf, 1.0):
        run.step({"w": gradient})
    assert len(asked) <= 3


def test_a13_an_update_costs_little_more_than_its_arithmetic(need):
    """Averaging 2000 small tensors takes at most 1.5 times the one multi-tensor operation that it is made of."""
    need("ema")
    from nvalchemi.training import EMAHook

    model = nn.ParameterList([nn.Parameter(torch.zeros(10)) for _ in range(2000)])
    hook = EMAHook()
    live, average = ([torch.zeros(10) for _ in range(2000)] for _ in range(2))

    def update(step):
        hook(TrainContext(models={"main": model}, step_count=step), TrainingStage.AFTER_OPTIMIZER_STEP)

    update(0)
    ours_took, bare_took = [], []
    for step in range(1, 40):
        begin = time.perf_counter()
        update(step)
        middle = time.perf_counter()
        torch._foreach_lerp_(average, live, 0.001)
        ours_took.append(middle - begin)
        bare_took.append(time.perf_counter() - middle)
    assert min(ours_took) <= 1.5 * min(bare_took)


def test_a01_a_state_that_waits_for_its_model_is_saved_as_it_is(ours, point, tmp_path):
    """Loaded and saved again before anything is set up, an average is not lost."""
    first, second, third = (ours(point(w=0.0), ema={"decay": 0.5}) for _ in range(3))
    for gradient in (0.0, -1.0):
        first.step({"w": gradient})
    first.save(tmp_path / "first")
    second.load(tmp_path / "first")
    second.save(tmp_path / "second")
    third.load(tmp_path / "second")
    third.step({"w": 0.0})
    assert (third.updates, third.live.w.item(), third.shadow.w.item()) == (3, 1.0, 0.75)


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_a02_the_best_checkpoint_holds_live_as_live(ours, point, tmp_path, lazy):
    """A checkpoint that is taken because the averaged weights evaluated best holds both copies, each as what it is."""
    from nvalchemi.training import Validation

    best = {"checkpoint": {"root": tmp_path / "kept", "best": "loss", "asynchronous": False, "at_end": False}}
    given = {"ema": {"decay": 0.5}, "hooks": [best], "lazy": lazy}
    run = ours(point(w=0.0), **given, validation=Validation(loader=[{"w": -1.0}]), num_epochs=2)
    run.epoch([{"w": -1.0}])
    resumed = ours(point(w=9.0), **given, num_epochs=2)
    resumed.load(tmp_path / "kept")
    assert (resumed.live.w.item(), resumed.average_of("w")) == (run.live.w.item(), run.shadow.w.item()) == (2.0, 1.5)


@pytest.mark.parametrize("use_buffers", [True, False])
@pytest.mark.parametrize("dtype", HALF)
def test_a06_buffers_in_half_precision_are_averaged_as_weights_are(ours, use_buffers, dtype):
    """A bfloat16 or float16 buffer moves as its float32 average does; copied, it is that of the live model."""

    class Moving(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(()))
            self.register_buffer("mean", torch.ones((), dtype=dtype))

        def forward(self, mean):
            self.mean.fill_(mean)
            return self.w * 0.0

    run = ours(Moving(), ema={"decay": 0.999, **({} if use_buffers else {"use_buffers": False})})
    for mean in [1.0] + [2.0] * 1000:
        run.step(mean)
    expected = 1.6323 if use_buffers else 2.0
    assert run.shadow.mean.item() == pytest.approx(expected, abs=1e-3 + torch.finfo(dtype).eps)
