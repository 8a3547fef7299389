"""The rule on tensors is the rule in plain numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi_hooks_loss_scaling.kernels import ScaleRule, advance, bound, reference

RULES = st.builds(
    ScaleRule,
    growth_factor=st.floats(1.0, 1e6, exclude_min=True),
    backoff_factor=st.floats(1e-6, 1.0, exclude_min=True, exclude_max=True),
    growth_interval=st.integers(1, 4),
    min_scale=st.floats(1e-30, 1.0),
    max_scale=st.floats(1.0, 3.4e38),
)


@given(rule=RULES, windows=st.lists(st.booleans(), max_size=12))
@settings(deadline=None, max_examples=100)
def test_tensors_follow_the_reference(rule, windows):
    """Any rule over any windows gives the same scale and count on tensors as in plain numbers, to the bit."""
    scale, count = 1.0, 0
    on_device, tracker = torch.tensor(scale), torch.zeros((), dtype=torch.int32)
    for found_inf in windows:
        scale, count = reference.advance(scale, count, found_inf, rule)
        advance(on_device, tracker, torch.tensor(float(found_inf)), rule)
        on_device = bound(on_device, rule)
        assert (on_device.item(), tracker.item()) == (scale, count)


def test_a_growth_beyond_float32_is_left_out():
    """At 3e38 doubling would be infinite, so both versions keep the scale and count afresh."""
    rule = ScaleRule(2.0, 0.5, 1, 1.0, 3.4e38)
    scale, tracker = torch.tensor(3e38), torch.zeros((), dtype=torch.int32)
    before = scale.item()
    advance(scale, tracker, torch.tensor(0.0), rule)
    assert bound(scale, rule).item() == before
    assert reference.advance(scale.item(), 0, False, rule) == (scale.item(), 0)


@pytest.mark.parametrize("flag", [1.0, 2.0, 0.5, float("nan"), float("inf")])
def test_any_flag_but_zero_backs_off(flag):
    """A flag that is not exactly 0 backs off once, nan included, and starts the count afresh."""
    scale, tracker = torch.tensor(8.0), torch.tensor(1, dtype=torch.int32)
    advance(scale, tracker, torch.tensor(flag), ScaleRule(2.0, 0.5, 3, 1.0, 64.0))
    assert (scale.item(), tracker.item()) == (4.0, 0)


def test_nothing_is_read_and_one_scalar_is_launched(host_reads):
    """An update costs one launch on scalars and reads nothing back; the bounds cost one more, later."""
    scale, tracker, flag = torch.tensor(8.0), torch.zeros((), dtype=torch.int32), torch.ones(())
    with host_reads() as cost:
        advance(scale, tracker, flag, ScaleRule(2.0, 0.5, 3, 1.0, 64.0))
    assert cost.reads == []
    assert len(cost.launches) == 1
