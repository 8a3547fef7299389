"""Random sequences of what can happen to a run, each against a plain account of what must hold."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from .sequences.machine import StrategyMachine


def test_a_strategy_keeps_its_books():
    """Whatever the sequence."""
    run_state_machine_as_test(StrategyMachine, settings=settings(max_examples=int(__import__("os").environ.get("N","200")), stateful_step_count=10, deadline=None, suppress_health_check=list(HealthCheck)))
