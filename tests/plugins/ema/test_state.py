"""Saving, restoring, and what is refused."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from nvalchemi.training import TrainingStage
from nvalchemi_hooks_ema import EMAHook

SETTINGS = {"model_key": "main", "decay": 0.9, "update_every": 1, "start_step": 0, "use_buffers": True}


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(dtype)


def train(hook: EMAHook, model: nn.Module, steps: range, follow, perturb) -> None:
    for step in steps:
        perturb(model, step)
        follow(hook, model, step)


def through_a_file(state: dict) -> dict:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_the_state_holds_settings_counter_and_average(follow, perturb):
    """Settings, num_updates and averaged_model_state, no device, and no average before it is built."""
    hook = EMAHook(decay=0.9)
    assert hook.state_dict() == {**SETTINGS, "num_updates": 0}
    train(hook, net(), range(2), follow, perturb)
    state = hook.state_dict()
    assert set(state) == {*SETTINGS, "num_updates", "averaged_model_state"}
    assert (state["num_updates"], state["averaged_model_state"]["n_averaged"].item()) == (2, 2)
    train(low := EMAHook(decay=0.9), net(torch.bfloat16), range(1), follow, perturb)
    assert set(low.state_dict()) == {*SETTINGS, "num_updates", "averaged_model_state", "accumulators"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_is_plain_data(dtype, follow, perturb, same):
    """It survives a file read with weights_only=True, bit for bit."""
    hook = EMAHook(decay=0.9)
    train(hook, net(dtype), range(3), follow, perturb)
    state = hook.state_dict()
    assert same(through_a_file(state), state)
    assert {type(value) for value in state.values()} <= {str, float, int, bool, dict}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_is_independent_of_later_training(dtype, follow, perturb, same):
    """What was returned does not change when training goes on, and changing it does not change the hook."""
    model, hook = net(dtype), EMAHook(decay=0.9)
    train(hook, model, range(2), follow, perturb)
    state, kept = hook.state_dict(), through_a_file(hook.state_dict())
    train(hook, model, range(2, 4), follow, perturb)
    assert same(state, kept)
    now = through_a_file(hook.state_dict())
    for part in ("averaged_model_state", "accumulators"):
        for value in state.get(part, {}).values():
            value.zero_()
    assert same(hook.state_dict(), now)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("setup", ["setup first", "load first", "no setup"])
def test_resuming_equals_going_straight_through(dtype, setup, follow, perturb, context, same):
    """Twenty steps equal ten, a file, and ten more in a fresh hook, bit for bit, whenever the state is loaded."""
    model, straight = net(dtype), EMAHook(decay=0.9)
    train(straight, model, range(10), follow, perturb)
    saved = through_a_file({"model": model.state_dict(), "ema": straight.state_dict()})
    train(straight, model, range(10, 20), follow, perturb)

    other, resumed = net(dtype), EMAHook(decay=0.9)
    other.load_state_dict(saved["model"])
    if setup == "setup first":
        resumed(context(other), TrainingStage.SETUP)
    resumed.load_state_dict(saved["ema"])
    if setup == "load first":
        resumed(context(other), TrainingStage.SETUP)
        assert same(resumed.state_dict(), saved["ema"])
    train(resumed, other, range(10, 20), follow, perturb)
    assert same(resumed.state_dict(), straight.state_dict())
    assert same(other.state_dict(), model.state_dict())


def test_after_a_restore_the_first_update_blends(primed, fill, follow):
    """A restored average is never wiped by a first copy."""
    model = nn.Linear(1, 1, bias=False)
    state = primed(model, 0.0, decay=0.75).state_dict()
    resumed = EMAHook(decay=0.75)
    resumed.load_state_dict(state)
    fill(model, 4.0)
    follow(resumed, model, 1)
    assert resumed.get_averaged_model().module.weight.item() == 1.0
    assert resumed.num_updates == 2


@pytest.mark.parametrize("built", [True, False])
def test_a_state_from_before_the_first_update_restores_a_fresh_shadow(built, context, fill, follow):
    """Saved before the first update, built or not, the restored average begins with a copy."""
    model, hook = nn.Linear(1, 1, bias=False), EMAHook(decay=0.5)
    if built:
        hook.setup(context(model))
    resumed = EMAHook(decay=0.5)
    resumed.load_state_dict(hook.state_dict())
    fill(model, 7.0)
    follow(resumed, model)
    assert resumed.get_averaged_model().module.weight.item() == 7.0


@pytest.mark.parametrize(
    ("name", "value"),
    [("model_key", "student"), ("decay", 0.5), ("update_every", 3), ("start_step", 7), ("use_buffers", False)],
)
def test_a_setting_that_differs_is_refused_with_both_values(name, value, follow, perturb, same):
    """A state of another configuration is a ValueError with both values, and nothing has changed."""
    hook = EMAHook(decay=0.9)
    train(hook, net(), range(2), follow, perturb)
    before = hook.state_dict()
    with pytest.raises(ValueError, match=rf"{name}={value!r} into a hook with {name}={SETTINGS[name]!r}"):
        hook.load_state_dict({**before, name: value, "num_updates": 99})
    assert same(hook.state_dict(), before)


def test_absent_settings_and_an_absent_counter_are_ignored(follow, perturb, same):
    """A state with the average alone loads, and the counter stays."""
    hook = EMAHook(decay=0.9)
    train(hook, net(), range(2), follow, perturb)
    state = hook.state_dict()
    other = EMAHook(decay=0.9, num_updates=5)
    other.load_state_dict({"averaged_model_state": state["averaged_model_state"]})
    assert other.num_updates == 5
    assert same(other.state_dict()["averaged_model_state"], state["averaged_model_state"])


@pytest.mark.parametrize("count", [-1, 1.5, "3", None, True])
def test_a_counter_that_is_no_count_is_refused(count):
    """num_updates in a state is an int from 0 on."""
    with pytest.raises(ValueError, match=rf"num_updates={count!r}"):
        EMAHook().load_state_dict({"num_updates": count})


def test_an_absent_average_clears_a_live_one(primed, fill, follow):
    """Loading a state without averaged weights drops the average; the next update begins with a copy."""
    model = nn.Linear(1, 1, bias=False)
    hook = primed(model, 1.0, decay=0.5)
    hook.load_state_dict({**EMAHook(decay=0.5).state_dict()})
    with pytest.raises(RuntimeError, match="no averaged model"):
        hook.get_averaged_model()
    assert "averaged_model_state" not in hook.state_dict()
    fill(model, 5.0)
    follow(hook, model, 1)
    assert hook.get_averaged_model().module.weight.item() == 5.0


def test_an_absent_average_clears_a_pending_one(primed, fill, follow):
    """A waiting average is dropped too."""
    model = nn.Linear(1, 1, bias=False)
    hook = EMAHook(decay=0.5)
    hook.load_state_dict(primed(model, 1.0, decay=0.5).state_dict())
    hook.load_state_dict({"num_updates": 0})
    assert "averaged_model_state" not in hook.state_dict()
    fill(model, 5.0)
    follow(hook, model, 1)
    assert hook.get_averaged_model().module.weight.item() == 5.0


def test_a_pending_average_is_saved_again(follow, perturb, same):
    """A hook that was restored and never trained saves what it was given, and what it was given may change later."""
    hook = EMAHook(decay=0.9)
    train(hook, net(torch.bfloat16), range(2), follow, perturb)
    state, given = hook.state_dict(), hook.state_dict()
    waiting = EMAHook(decay=0.9)
    waiting.load_state_dict(given)
    given["averaged_model_state"]["module.0.weight"].zero_()
    given["accumulators"]["0.weight"].zero_()
    assert same(waiting.state_dict(), state)


def test_absent_accumulators_are_seeded_from_the_averaged_weights(follow, fill):
    """A state without accumulators restores a bfloat16 average from its weights, live or pending."""
    for live in (True, False):
        model, hook = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16), EMAHook(decay=0.999)
        fill(model, 3.0)
        if live:
            follow(hook, model)
        state = {"n_averaged": torch.tensor(1), "module.weight": torch.ones(1, 1, dtype=torch.bfloat16)}
        hook.load_state_dict({"averaged_model_state": state})
        fill(model, 2.0)
        follow(hook, model, 1)
        assert hook.state_dict()["accumulators"]["weight"].item() == pytest.approx(1.001, abs=1e-6)


def test_a_state_of_another_precision_is_taken_exactly(follow, fill):
    """A float32 average goes on in bfloat16 from its exact value, and the other way round from the accumulator."""
    wide, low = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    for first, second in ((wide, low), (low, wide)):
        hook = EMAHook(decay=0.999)
        for step, value in enumerate((1.0, 2.0)):
            fill(first, value)
            follow(hook, first, step)
        resumed = EMAHook(decay=0.999)
        resumed.load_state_dict(hook.state_dict())
        fill(second, 2.0)
        follow(resumed, second, 2)
        assert resumed.get_averaged_model().module.weight.dtype == second.weight.dtype
        state = resumed.state_dict()
        exact = state.get("accumulators", {}).get("weight", state["averaged_model_state"]["module.weight"])
        assert exact.item() == pytest.approx(2 - 0.999**2, abs=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("module.weight"), r"lacks \['module\.weight'\]"),
        (lambda s: s.pop("n_averaged"), r"lacks \['n_averaged'\]"),
        (lambda s: s.update({"module.other": torch.zeros(1)}), r"has \['module\.other'\] besides"),
        (
            lambda s: s.update({"module.weight": torch.zeros(3, 3)}),
            r"'module\.weight' has shape \(3, 3\).* \(1, 2\)",
        ),
    ],
)
@pytest.mark.parametrize("built", [True, False])
def test_the_weights_of_another_model_are_refused(change, message, built, primed, follow, same):
    """Names and shapes that do not fit are a ValueError that names them, when loaded or when built; nothing changes."""
    model = nn.Linear(2, 1)
    hook = primed(model, 1.0)
    state = hook.state_dict()
    change(state["averaged_model_state"])
    if built:
        before = hook.state_dict()
        with pytest.raises(ValueError, match=message):
            hook.load_state_dict({**state, "num_updates": 50})
        assert same(hook.state_dict(), before)
    else:
        waiting = EMAHook()
        waiting.load_state_dict(state)
        with pytest.raises(ValueError, match=message):
            follow(waiting, model)
        assert same(waiting.state_dict(), state)


def test_loading_keeps_the_averaged_model_the_user_holds(primed, fill):
    """A reference to the averaged model stays valid over a load, and shows the restored weights."""
    model = nn.Linear(1, 1)
    hook = primed(model, 1.0)
    averaged, state = hook.get_averaged_model(), hook.state_dict()
    fill(averaged, 9.0)
    hook.load_state_dict(state)
    assert hook.get_averaged_model() is averaged
    assert averaged.module.weight.item() == 1.0


def test_saved_weights_load_strictly_into_the_bare_model(primed):
    """The averaged module's own state is that of the live model, name for name."""
    model = net()
    other = net()
    other.load_state_dict(primed(model, 2.0).get_averaged_model().module.state_dict(), strict=True)
    assert other[0].weight[0, 0].item() == 2.0
