"""A pytest plugin: how many checks of the kit ran, and a failure when a hook was not checked at all."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from nvalchemi.testing.needed import pytest

__all__ = ["ConformanceReport", "pytest_configure", "report_to"]

_NAME = "nvalchemi-conformance"
_PROPERTY = "nvalchemi_conformance"


class ConformanceReport:
    """Counts checks by test class. A class none of whose checks ran fails the run."""

    def __init__(self) -> None:
        self._outcomes: dict[str, Counter[str]] = defaultdict(Counter)

    @property
    def unchecked(self) -> list[str]:
        """The test classes that have checked nothing."""
        return [name for name, outcomes in self._outcomes.items() if not outcomes.total() - outcomes["skipped"]]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a check when it has run, or was skipped or failed before."""
        name = dict(report.user_properties).get(_PROPERTY)
        if name is None or (report.when != "call" and report.outcome == "passed"):
            return
        outcome = "expected to fail" if hasattr(report, "wasxfail") else report.outcome
        self._outcomes[str(name)][outcome] += 1

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Let a run fail that has checked nothing."""
        if self.unchecked and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print one line for each test class."""
        terminalreporter.section("hook conformance")
        for name, outcomes in self._outcomes.items():
            ran = outcomes.total() - outcomes["skipped"]
            parts = [f"{count} {outcome}" for outcome, count in sorted(outcomes.items())]
            terminalreporter.line(f"{name}: {ran} checks run ({', '.join(parts)})")
        for name in self.unchecked:
            terminalreporter.line(
                f"{name}: NOTHING WAS CHECKED, so this run fails; look at the reasons of the skips (pytest -rs)",
                red=True,
            )


def pytest_configure(config: pytest.Config) -> None:
    """Join a run: with ``-p nvalchemi.testing.report`` from the beginning, or else with the first check."""
    if not config.pluginmanager.has_plugin(_NAME):
        config.pluginmanager.register(ConformanceReport(), _NAME)


def report_to(request: pytest.FixtureRequest) -> None:
    """Have a check counted."""
    pytest_configure(request.config)
    request.node.user_properties.append((_PROPERTY, f"{request.node.path.name}::{request.cls.__name__}"))
