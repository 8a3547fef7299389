"""What may be said of a window, and what a state of it must be."""

from __future__ import annotations

import pytest

from nvalchemi_hooks_grad_accum import GradientAccumulationHook


@pytest.mark.parametrize("steps", [0, -1, True, 2.0, "2", None])
def test_steps_is_an_int_of_one_or_above(steps):
    """Anything else is refused with its value."""
    with pytest.raises(ValueError, match=rf"steps is {steps!r}; give an int of 1 or above"):
        GradientAccumulationHook(steps=steps)


def test_what_to_do_about_a_nan_is_one_of_two_words():
    """A word that means nothing is refused."""
    with pytest.raises(ValueError, match='on_nonfinite is \'ignore\'; give "veto" or "drop"'):
        GradientAccumulationHook(steps=2, on_nonfinite="ignore")


@pytest.mark.parametrize(
    "changes", [{"batches": 1.0}, {"batches": True}, {"total": "2"}, {"more": 1}, {"batches": -1}, {"torn": 1}]
)
def test_a_state_that_is_none_is_refused(changes):
    """What state_dict does not return is not taken over."""
    hook = GradientAccumulationHook(steps=2)
    with pytest.raises(ValueError, match="the state is"):
        hook.load_state_dict({**hook.state_dict(), **changes})
    assert hook.batches == 0


def test_an_open_window_keeps_its_length(make_strategy, make_batches):
    """A window that was begun as one of four cannot be gone on with as one of two; a new one can."""
    strategy = make_strategy()
    strategy.train_batch(make_batches(2)[0])
    open_state = strategy.hooks[0].state_dict()
    with pytest.raises(ValueError, match="an open window of 4 batches, but steps is 2; go on with steps=4"):
        GradientAccumulationHook(steps=2).load_state_dict(open_state)
    GradientAccumulationHook(steps=2).load_state_dict(GradientAccumulationHook(steps=4).state_dict())
