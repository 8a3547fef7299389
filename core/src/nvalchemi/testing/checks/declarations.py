"""What the switches say of the hook: a power that is not declared would go unchecked."""

from __future__ import annotations

from nvalchemi.hooks import CheckpointableHook
from nvalchemi.testing.checks.base import Checks, check, require
from nvalchemi.training.hooks import TrainingUpdateHook

__all__ = ["DeclarationChecks"]


class DeclarationChecks(Checks):
    """Whether the hook is what the test class says."""

    @check("set the switch on the test class to what the hook is, or mend the hook.")
    def test_the_switches_are_true(self) -> None:
        """Every switch of the test class says what the hook is, so that nothing is skipped by mistake."""
        hook = self.fresh_hook()
        actual = {"stateful": isinstance(hook, CheckpointableHook)}
        if isinstance(hook, TrainingUpdateHook):
            actual["defers_veto"] = hook.defers_veto
            actual["decides_alike"] = hook.decides_alike
            actual["reads_grad"] = hook.reads_grad
            own = type(hook).transform_loss is not TrainingUpdateHook.transform_loss
            # Who overrides __call__ may transform the loss there, and only the author knows.
            if own or type(hook).__call__ is TrainingUpdateHook.__call__:
                actual["transforms_loss"] = own
        wrong = [
            f"{name} is {getattr(self, name)} on {type(self).__name__}, and {value} on {type(hook).__name__}"
            for name, value in actual.items()
            if getattr(self, name) != value
        ]
        require(not wrong, "; ".join(wrong))
