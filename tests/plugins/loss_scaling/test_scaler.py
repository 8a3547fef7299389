"""LossScaler: torch's sequence of scales, a floor, a ceiling, no waiting, plain state."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi.hooks import GradientScaler
from nvalchemi_hooks_loss_scaling import LossScaler

POWERS_OF_TWO = st.integers(-14, 32).map(lambda exponent: 2.0**exponent)


def scales(scaler, *windows):
    seen = []
    for found_inf in windows:
        scaler.close(found_inf)
        seen.append(scaler.get_scale())
    return seen


def torch_scales(windows, **options):
    """Give the scales of torch's own scaler after each window, through its public interface."""
    scaler, seen = torch.amp.GradScaler("cpu", **options), []
    for found_inf in windows:
        parameter = torch.nn.Parameter(torch.tensor(0.0))
        optimizer = torch.optim.SGD([parameter], lr=0.0)
        scaler.scale(parameter * 1.0)
        parameter.grad = torch.tensor(torch.inf if found_inf else 0.0)
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    return seen


@given(
    windows=st.lists(st.booleans(), min_size=1, max_size=20),
    init_scale=st.floats(2.0**-10, 2.0**20, width=32),
    growth_factor=st.floats(1.0, 4.0, exclude_min=True),
    backoff_factor=st.floats(0.01, 1.0, exclude_max=True),
    growth_interval=st.integers(1, 5),
)
@settings(deadline=None, max_examples=60)
def test_the_scale_goes_through_torchs_values(windows, **options):
    """Where floor and ceiling do not bind, every scale equals that of torch.amp.GradScaler, to the bit."""
    own = LossScaler(min_scale=2.0**-126, max_scale=2.0**64, **options)
    assert scales(own, *windows) == torch_scales(windows, **options)


def test_defaults_are_those_of_torch():
    """Start, growth, back-off and interval are torch's own unless somebody says otherwise."""
    own, torchs = LossScaler().settings, torch.amp.GradScaler("cpu")
    assert own.first_scale == torchs.get_scale()
    assert own.rule.growth_factor == torchs.get_growth_factor()
    assert own.rule.backoff_factor == torchs.get_backoff_factor()
    assert own.rule.growth_interval == torchs.get_growth_interval()


def test_it_fulfils_the_protocol_of_scalers():
    """The core recognises it as a scaler that folds, and it is always enabled."""
    assert isinstance(LossScaler(), GradientScaler)
    assert LossScaler().is_enabled() is True


def test_none_leaves_the_scale_and_the_count():
    """A window that ends without a step and without inf changes neither the scale nor the count of good ones."""
    scaler = LossScaler(init_scale=8.0, growth_interval=3)
    scaler.close(False)
    before = scaler.state_dict()
    scaler.close(None)
    assert scaler.state_dict() == before


def test_a_static_scale_never_moves():
    """A number as scale stays, whatever the windows were."""
    assert scales(LossScaler(scale=128.0), True, False, None, True) == [128.0] * 4


def test_the_floor_keeps_a_scale_to_recover_from():
    """From 65536 with nan in every window, 200 windows end at the floor, where torch's scale is 0."""
    scaler = LossScaler(init_scale=65536.0, min_scale=2.0**-14)
    assert scales(scaler, *[True] * 200)[-1] == 2.0**-14
    assert torch.isfinite(torch.ones(()) / scaler.divisor(torch.device("cpu")))


def test_the_ceiling_stops_growth():
    """Good windows for ever grow the scale to the ceiling, not to infinity."""
    scaler = LossScaler(init_scale=8.0, growth_interval=1, max_scale=20.0)
    assert scales(scaler, *[False] * 4) == [16.0, 20.0, 20.0, 20.0]


def test_a_divisor_keeps_its_value_when_the_window_closes():
    """What was handed out in a window is not changed by its end."""
    scaler = LossScaler(init_scale=8.0)
    divisor = scaler.divisor(torch.device("cpu"))
    scaler.close(True)
    assert (divisor.item(), scaler.divisor(torch.device("cpu")).item()) == (8.0, 4.0)
    assert (divisor.dtype, divisor.dim()) == (torch.float32, 0)


def test_a_pending_backward_pass_survives_the_end_of_the_window():
    """The graph of a scaled loss uses the scale of its own window, also when that has closed in between."""
    scaler, weight = LossScaler(init_scale=8.0), torch.nn.Parameter(torch.tensor(1.0))
    loss = scaler.scale(weight * 3.0)
    scaler.close(True)
    loss.backward()
    assert weight.grad.item() == 24.0


@given(number=st.floats(2.0**-60, 2.0**60, width=32), scale=POWERS_OF_TWO)
@settings(deadline=None)
def test_scale_then_unscale_is_the_identity(number, scale):
    """For a scale that is a power of two, dividing by the divisor gives the number back, to the bit."""
    scaler = LossScaler(scale=scale)
    value = torch.tensor(number)
    assert scaler.scale(value) / scaler.divisor(value.device) == value


@pytest.mark.parametrize(
    ("dtype", "scaled"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_a_scaled_loss_has_room(dtype, scaled):
    """A half-precision loss is scaled in float32, so that 1000 * 65536 does not overflow; a double one stays double."""
    result = LossScaler().scale(torch.tensor(1000.0, dtype=dtype))
    assert result.dtype == scaled
    assert result.item() == 65536000.0


def test_a_window_reads_nothing_back(host_reads):
    """Scaling, dividing and closing never make the host wait, whichever way the window ends."""
    scaler, loss = LossScaler(), torch.ones(())
    with host_reads() as cost:
        for found_inf in (True, False, None):
            scaler.scale(loss)
            scaler.divisor(loss.device)
            scaler.close(found_inf)
    assert cost.reads == []


def test_a_flag_on_the_device_decides_without_the_host(host_reads):
    """A tensor flag closes the window as the bool of its value does, and is not read."""
    scaler = LossScaler(init_scale=8.0, growth_interval=1)
    with host_reads() as cost:
        scaler.close(torch.tensor(1.0))
        scaler.close(torch.tensor(0.0))
        scaler.close(torch.tensor(0.0))
    assert cost.reads == []
    assert scaler.get_scale() == 16.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": "static"}, r"scale is 'static'; give 'dynamic' or a number above 0"),
        ({"scale": True}, "scale is True"),
        ({"scale": 0.0}, "scale is 0.0"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"scale": float("inf")}, "scale is inf"),
        ({"scale": 1e39}, r"scale is 1e\+39"),
        ({"init_scale": -1.0}, "init_scale is -1.0; give a number above 0"),
        ({"init_scale": "8"}, "init_scale is '8'"),
        ({"init_scale": True}, "init_scale is True"),
        ({"init_scale": float("nan")}, "init_scale is nan"),
        ({"init_scale": 10**400}, "init_scale is 1000"),
        ({"growth_factor": 1.0}, "growth_factor is 1.0; give a finite number above 1"),
        ({"growth_factor": float("inf")}, "growth_factor is inf"),
        ({"growth_factor": float("nan")}, "growth_factor is nan"),
        ({"growth_factor": True}, "growth_factor is True"),
        ({"backoff_factor": 1.0}, "backoff_factor is 1.0; give a number between 0 and 1"),
        ({"backoff_factor": 0.0}, "backoff_factor is 0.0"),
        ({"backoff_factor": float("nan")}, "backoff_factor is nan"),
        ({"growth_interval": 0}, "growth_interval is 0; give an int from 1"),
        ({"growth_interval": 2.0}, "growth_interval is 2.0"),
        ({"growth_interval": True}, "growth_interval is True"),
        ({"growth_interval": 2**31}, "growth_interval is 2147483648"),
        ({"min_scale": 0.0}, "min_scale is 0.0; give a number above 0"),
        ({"min_scale": 16.0, "init_scale": 8.0}, "min_scale is 16.0; give at most init_scale, which is 8.0"),
        ({"max_scale": 4.0, "init_scale": 8.0}, "max_scale is 4.0; give at least init_scale, which is 8.0"),
        ({"max_scale": float("inf")}, "max_scale is inf"),
    ],
)
def test_a_setting_out_of_range_is_refused(options, message):
    """A bad setting raises a ValueError with its name, its value and what to give instead."""
    with pytest.raises(ValueError, match=message):
        LossScaler(**options)


def test_scale_and_count_survive_a_checkpoint():
    """Start 8, interval 3, six good windows: 8, 8, 16, 16, 16, 32, also when saved and loaded after the second."""
    options = {"init_scale": 8.0, "growth_interval": 3}
    straight = LossScaler(**options)
    assert scales(straight, *[False] * 6) == [8.0, 8.0, 16.0, 16.0, 16.0, 32.0]
    saved = LossScaler(**options)
    scales(saved, False, False)
    resumed = LossScaler(**options)
    resumed.load_state_dict(saved.state_dict())
    assert scales(resumed, *[False] * 4) == [16.0, 16.0, 16.0, 32.0]


def test_a_state_is_plain_data_that_later_training_leaves_alone():
    """The state loads with weights_only=True, and does not change when training goes on."""
    scaler = LossScaler(init_scale=8.0, growth_interval=1)
    state = scaler.state_dict()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    scaler.close(False)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True) == state
    assert state["scale"] == 8.0
    assert {type(value) for value in state.values()} <= {float, int, bool}


def test_a_static_state_comes_back():
    """A static scale saves and loads, and stays."""
    scaler = LossScaler(scale=128.0)
    scaler.load_state_dict(scaler.state_dict())
    assert scales(scaler, True) == [128.0]


def test_the_state_of_torchs_scaler_loads():
    """A run that began with torch.amp.GradScaler goes on with its scale and its count of good steps."""
    torchs = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    torchs.load_state_dict({**torchs.state_dict(), "_growth_tracker": 2})
    torchs.scale(torch.ones(()))  # torch makes its tensors here
    scaler = LossScaler(growth_interval=3)
    scaler.load_state_dict(torchs.state_dict())
    assert scales(scaler, False, False) == [16.0, 16.0]


def test_an_empty_state_warns_and_starts_afresh():
    """The empty state of a disabled scaler gives a warning with the scale that the run goes on from."""
    scaler = LossScaler(init_scale=8.0)
    scaler.close(True)
    with pytest.warns(UserWarning, match=r"did not scale its loss.*fresh scale of 8\.0"):
        scaler.load_state_dict({})
    assert scaler.state_dict() == LossScaler(init_scale=8.0).state_dict()


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"growth_factor": 4.0}, "growth_factor is 4.0 in the saved state and 2.0 here"),
        ({"backoff_factor": 0.25}, "backoff_factor is 0.25 in the saved state and 0.5 here"),
        ({"growth_interval": 7}, "growth_interval is 7 in the saved state and 2000 here"),
        ({"min_scale": 4.0}, "min_scale is 4.0 in the saved state and 6.1"),
        ({"max_scale": 65536.0}, "max_scale is 65536.0 in the saved state and 4294967296.0 here"),
        ({"scale": "static"}, "scale is 'static' in the saved state"),
        ({"scale": 0.0}, "scale is 0.0 in the saved state"),
        ({"scale": float("nan")}, "scale is nan in the saved state"),
        ({"scale": None}, "scale is None in the saved state"),
        ({"scale": True}, "scale is True in the saved state"),
        ({"scale": 2.0**40}, "scale is 1099511627776.0 in the saved state"),
        ({"growth_tracker": None}, "growth_tracker is None in the saved state"),
        ({"growth_tracker": -1}, "growth_tracker is -1 in the saved state"),
        ({"dynamic": False}, "dynamic is False in the saved state and True here"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(saved, message):
    """A differing setting or an impossible number is a ValueError with both values, and the scaler stays as it was."""
    scaler = LossScaler()
    scaler.close(True)
    before = scaler.state_dict()
    with pytest.raises(ValueError, match=message):
        scaler.load_state_dict({**before, **saved})
    assert scaler.state_dict() == before


def test_settings_that_the_state_does_not_hold_are_not_compared():
    """Leaving a setting out of the state goes on with the one at hand, as the message says."""
    state = LossScaler(growth_interval=7, init_scale=8.0).state_dict()
    del state["growth_interval"]
    state["growth_tracker"] = 5
    scaler = LossScaler(growth_interval=3)
    scaler.load_state_dict(state)
    assert scales(scaler, False) == [16.0]  # a count beyond the shorter interval is a growth that is due


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))])
def test_a_copy_counts_for_itself(clone):
    """A copied or unpickled scaler goes on from the same scale and count, and shares nothing."""
    scaler = LossScaler(init_scale=8.0, growth_interval=2)
    scaler.close(False)
    copied = clone(scaler)
    assert copied.state_dict() == scaler.state_dict()
    copied.close(False)
    assert (copied.get_scale(), scaler.get_scale()) == (16.0, 8.0)
    assert scaler.state_dict()["growth_tracker"] == 1


def test_no_warning_is_given_in_a_window():
    """A whole window of the scaler passes with warnings as errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler = LossScaler()
        scaler.scale(torch.ones((), requires_grad=True)).backward()
        scaler.close(True)
