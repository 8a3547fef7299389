"""The conformance kit: all that a hook has to fulfil, as a test class to derive from."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nvalchemi.testing.checks.costs import CostChecks
from nvalchemi.testing.checks.decisions import DecisionChecks
from nvalchemi.testing.checks.declarations import DeclarationChecks
from nvalchemi.testing.checks.discovery import DiscoveryChecks
from nvalchemi.testing.checks.gradients import GradientChecks
from nvalchemi.testing.checks.lifetime import LifetimeChecks
from nvalchemi.testing.checks.processes import ProcessChecks
from nvalchemi.testing.checks.state import StateChecks
from nvalchemi.testing.needed import pytest
from nvalchemi.testing.report import report_to

__all__ = ["HookConformance"]


class HookConformance(
    DeclarationChecks,
    DiscoveryChecks,
    DecisionChecks,
    GradientChecks,
    StateChecks,
    ProcessChecks,
    LifetimeChecks,
    CostChecks,
):
    """Every check that applies to a hook, update hook or plain hook, as the tests of one class.

    Derive from it in a file of your tests and say how the hook is made and what it can do. A check that does not apply
    is skipped with its reason; a failing one says what must hold and what to do. Set the hook up so that it acts within
    a few steps: a threshold that is never reached is not checked.

    Attributes
    ----------
    factory : callable
        The hook's class, or a function that returns a hook.
    arguments : mapping
        Its keyword arguments. As a property it may use ``self.folder``, a folder of the hook's own.
    entry_point : str, optional
        The name by which strategies find the hook, ``distribution:name`` if need be; None as long as it has none.
    vetoes : bool
        It may veto a step. `vetoed_batch` then makes a batch that provokes it.
    stateful : bool
        It has ``state_dict`` and ``load_state_dict``.
    transforms_loss : bool
        It returns another loss than it was given.
    reads_grad, defers_veto, decides_alike : bool
        As on the hook.
    sparse_gradients, low_precision : bool
        It takes sparse gradients; it takes weights in bfloat16.
    supports_cuda : bool
        It is meant to work on a GPU, and is tried where there is one.
    host_reads : int
        How often a step with this hook waits for the device, besides the one read that all hooks share.
    run_marks : tuple of str
        Keys of its state that say which run it is and not how far it is: runs that are equal differ there.
    expected_failures : mapping of str to str
        A check that fails, and why that is known. It is strict: one that passes is a failure.

    Raises
    ------
    TypeError
        When the class is made: `expected_failures` names a check that does not exist.

    Examples
    --------
    In ``tests/test_conformance.py``; ``pytest`` runs it like any other test class:

    >>> from nvalchemi.testing import HookConformance, LossFactorHook
    >>> class TestLossFactor(HookConformance):
    ...     factory = LossFactorHook
    ...     arguments = {"factor": 0.5}
    ...     transforms_loss = True
    ...     reads_grad = False
    """

    __test__ = False  # only what derives from it is collected

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__test__ = cls.__dict__.get("__test__", True)  # whatever its name
        made = cls.__dict__.get("factory")
        if inspect.isfunction(made) and next(iter(inspect.signature(made).parameters), "") != "self":
            cls.factory = staticmethod(made)  # a function in a class body would become a method
        checks = [name for name in dir(cls) if getattr(getattr(cls, name), "is_check", False)]
        for name in cls.expected_failures:
            if name not in checks:
                closest = difflib.get_close_matches(name, checks, n=1, cutoff=0.0)[0]
                raise TypeError(
                    f"{cls.__name__}.expected_failures names {name!r}, which is no check; did you mean {closest!r}?"
                )

    @pytest.fixture(autouse=True)
    def _conformance(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
        """Count the check, expect its failure if that was declared, and leave random numbers as they were."""
        report_to(request)
        self._folders = self.folder = tmp_path
        if reason := self.expected_failures.get(request.node.name):
            request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
        with torch.random.fork_rng(devices=[]):
            yield
