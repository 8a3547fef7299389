"""The rule: the fast way, the literal one, and the laws that both keep."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemi_hooks_spike_skip.kernels import History, reference

POSITIVE = st.lists(st.floats(1e-30, 1e30), min_size=1, max_size=40)
ANY = st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=40)
FEW = st.lists(st.sampled_from([1.0, 1.0, 2.0, 3.0]), min_size=1, max_size=40)  # many are equal


def limit(values, threshold=6.0, min_ratio=1.1, *, logarithmic=True, size=1000):
    """The limit by the way that runs."""
    history = History(size, logarithmic=logarithmic)
    for value in values:
        history.append(value)
    return history.limit(threshold, min_ratio)


@settings(max_examples=300, deadline=None)
@given(values=POSITIVE | FEW, threshold=st.floats(0, 20), min_ratio=st.floats(1, 10), size=st.integers(1, 50))
def test_logarithms_are_judged_as_the_reference_says(values, threshold, min_ratio, size):
    """Whatever the values and the size of the window, the limit is that of the literal rule, bit for bit."""
    expected = reference.limit(values[-size:], threshold, min_ratio, logarithmic=True)
    assert limit(values, threshold, min_ratio, size=size) == expected


@settings(max_examples=300, deadline=None)
@given(values=ANY | FEW, threshold=st.floats(0, 20), min_ratio=st.floats(1, 10), size=st.integers(1, 50))
def test_values_themselves_are_judged_as_the_reference_says(values, threshold, min_ratio, size):
    """The same holds for losses of any sign, which are judged by themselves."""
    expected = reference.limit(values[-size:], threshold, min_ratio, logarithmic=False)
    assert limit(values, threshold, min_ratio, logarithmic=False, size=size) == expected


@settings(max_examples=100, deadline=None)
@given(values=POSITIVE, seed=st.integers(0, 9))
def test_the_order_of_the_history_does_not_matter(values, seed):
    """A permutation of what came before gives the same limit."""
    shuffled = random.Random(seed).sample(values, len(values))
    for logarithmic in (True, False):
        assert limit(values, logarithmic=logarithmic) == limit(shuffled, logarithmic=logarithmic)


@settings(max_examples=100, deadline=None)
@given(values=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40), factor=st.floats(1e-3, 1e3))
def test_a_limit_follows_the_unit_of_the_loss(values, factor):
    """All values in another unit: the limit is the same in that unit, but for rounding."""
    for logarithmic in (True, False):
        expected = factor * limit(values, logarithmic=logarithmic)
        assert limit([factor * value for value in values], logarithmic=logarithmic) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(exponent=st.floats(0.2, 5), values=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=40))
def test_a_power_of_the_loss_is_judged_alike(exponent, values):
    """By logarithms a loss and its square or root skip the same steps: the limit is that power of the limit."""
    one, other = limit(values, min_ratio=1.0), limit([value**exponent for value in values], min_ratio=1.0)
    assert math.log(other) == pytest.approx(exponent * math.log(one), rel=1e-6, abs=1e-6) or one == math.inf


@settings(max_examples=100, deadline=None)
@given(good=st.lists(st.floats(0.9, 1.1), min_size=9, max_size=20), bad=st.lists(st.floats(1e3, 1e30), max_size=4))
def test_outliers_do_not_bend_the_rule(good, bad):
    """With fewer than a quarter of the values far out, these still stand out themselves: the limit stays below them."""
    values = good + bad[: len(good) // 4]
    assert limit(values, threshold=6.0) < 1e3


@pytest.mark.parametrize(("values", "expected"), [([2.0] * 5, 2.2), ([1.0, 1.0, 1.0, 50.0], 1.1)])
def test_values_that_do_not_vary_are_judged_by_their_ratio(values, expected):
    """Where the median absolute deviation is 0, min_ratio times the median is the limit."""
    assert limit(values, min_ratio=1.1) == pytest.approx(expected)
    assert limit(values, min_ratio=1.1, logarithmic=False) == pytest.approx(expected)


@pytest.mark.parametrize(("value", "logarithmic"), [(1.0, True), (0.0, False), (1.0, False)])
def test_without_spread_and_ratio_nothing_stands_out(value, logarithmic):
    """Equal values and min_ratio 1 (or a median of 0) say nothing, so everything is let through."""
    min_ratio = 3.0 if value == 0.0 else 1.0
    assert limit([value] * 4, min_ratio=min_ratio, logarithmic=logarithmic) == math.inf


def test_by_hand():
    """1, 2, 4, 8, 16: median 4, deviations of logarithms median log 2, so the limit is 4 * 2 ** (1.4826 k)."""
    assert limit([1.0, 8.0, 4.0, 2.0, 16.0], threshold=2.0) == pytest.approx(4 * 2 ** (1.4826 * 2))
    assert limit([1.0, 8.0, 4.0, 2.0, 16.0], 2.0, logarithmic=False) == pytest.approx(4 + 2 * 1.4826 * 3)


def test_a_straight_trend_is_no_spike():
    """A loss that grows by the same factor every step is never above its limit at the default threshold."""
    history = History(128, logarithmic=True)
    for step in range(400):
        value = 1.05**step
        assert len(history) < 8 or value <= history.limit(6.0, 1.1)
        history.append(value)
