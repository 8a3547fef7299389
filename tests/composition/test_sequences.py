"""Random sequences of what can happen to a run, each beside a plain account of what must hold.

``NVALCHEMI_SEQUENCES=50000 pytest -v test_sequences.py`` runs more of them, 500 a test.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test

from nvalchemi.errors import NonFiniteGradientError

from .sequences.defects import DEFECTS
from .sequences.machine import StrategyMachine

SEQUENCES = int(os.environ.get("NVALCHEMI_SEQUENCES", "2000"))
IN_ONE_TEST = 500


def run(sequences: int, number: int, **more: object) -> None:
    """Run the machine through sequences that are the same at each call with the same number."""

    @seed(number)
    class Seeded(StrategyMachine):
        pass

    profile = settings(
        max_examples=sequences,
        stateful_step_count=10,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        **more,
    )
    run_state_machine_as_test(Seeded, settings=profile)


@pytest.mark.parametrize("number", range(SEQUENCES // IN_ONE_TEST))
def test_a_strategy_keeps_to_the_book(number):
    """Whatever follows whatever: counters, who moved, scale, schedules, averages and contexts are those of the book."""
    run(IN_ONE_TEST, number)


@pytest.mark.parametrize("defect", DEFECTS)
def test_sequences_find_what_is_broken(defect, monkeypatch):
    """A feature that is taken out is missed within as many sequences as are run for nothing."""
    DEFECTS[defect](monkeypatch)
    with pytest.raises((AssertionError, Flaky, NonFiniteGradientError)):
        run(2000, 0, phases=[Phase.generate], report_multiple_bugs=False, print_blob=False)
