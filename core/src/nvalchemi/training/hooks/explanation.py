"""Saying which update hooks act when, in which order, and why."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

from nvalchemi.metadata import provenance_of
from nvalchemi.training.hooks.update import TrainingUpdateHook, UpdatePriority, overrides

__all__ = ["ExplainedHook", "Explanation"]

_STAGES = {
    "setup": "SETUP",
    "before_batch": "BEFORE_BATCH",
    "transform_loss": "DO_BACKWARD",
    "before_optimizer_step": "DO_OPTIMIZER_STEP",
    "after_optimizer_step": "AFTER_OPTIMIZER_STEP",
    "settled": "AFTER_OPTIMIZER_STEP (settled)",
}
_REASONS = {priority.value: priority.reason for priority in UpdatePriority}


@dataclass(frozen=True, slots=True)
class ExplainedHook:
    """One update hook in the order."""

    key: str
    hook: str
    priority: int
    reason: str
    stages: tuple[str, ...]
    may_veto: bool
    source: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Update hooks in the order in which they are called; ``str()`` of it is a table to read.

    Attributes
    ----------
    hooks : tuple of ExplainedHook
        The order is the same at every stage.
    """

    hooks: tuple[ExplainedHook, ...]

    @classmethod
    def of(cls, ordered: Sequence[tuple[TrainingUpdateHook, int]], overridden: Collection[str]) -> Self:
        """Explain hooks that are given in order with the priority that put them there."""
        return cls(tuple(_explained(hook, priority, overridden) for hook, priority in ordered))

    def __str__(self) -> str:
        if not self.hooks:
            return "No update hooks: gradients are zeroed, backward runs, every optimizer steps."
        lines = ["Update hooks, in the order in which each stage calls them:"]
        for hook in self.hooks:
            veto = "may veto" if hook.may_veto else "never vetoes"
            lines.append(f"  {hook.priority:>3}  {hook.key} ({hook.hook}, {hook.source}): {hook.reason}; {veto}")
            lines.append(f"       at {', '.join(hook.stages) or 'no stage'}")
        return "\n".join(lines)


def _explained(hook: TrainingUpdateHook, priority: int, overridden: Collection[str]) -> ExplainedHook:
    whole = overrides(hook, "__call__")
    origin = provenance_of(hook)
    return ExplainedHook(
        key=hook.state_key,
        hook=type(hook).__name__,
        priority=priority,
        reason="the user's priority"
        if hook.state_key in overridden
        else _REASONS.get(priority, "the hook's own priority"),
        stages=tuple(stage for method, stage in _STAGES.items() if whole or overrides(hook, method)),
        may_veto=whole or overrides(hook, "before_optimizer_step") or overrides(hook, "before_batch"),
        source=f"{origin.distribution} {origin.version}" if origin else "no distribution",
    )
