"""Saying which update hooks act when, in which order, and why."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from nvalchemi.metadata import provenance_of
from nvalchemi.training.hooks.stepping import StepOutcome
from nvalchemi.training.hooks.update import TrainingUpdateHook, UpdatePriority, overrides, takes_part_in_step

__all__ = ["ExplainedHook", "Explanation", "explain_hooks"]

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
    """One update hook in the order.

    Attributes
    ----------
    key : str
        Its `state_key`.
    hook : str
        Its class.
    priority : int
        What puts it where it stands.
    reason : str
        Why that priority.
    stages : tuple of str
        Where it does something.
    may_veto : bool
        Whether it can keep gradients or hold back a step.
    reads_grad : bool
        Whether pending factors are divided out of ``.grad`` before it is called at the step.
    source : str
        The distribution and version it comes from.
    """

    key: str
    hook: str
    priority: int
    reason: str
    stages: tuple[str, ...]
    may_veto: bool
    reads_grad: bool
    source: str

    def __str__(self) -> str:
        veto = "may veto" if self.may_veto else "never vetoes"
        reads = ", reads gradients" if self.reads_grad else ""
        return (
            f"  {self.priority:>3}  {self.key} ({self.hook}, {self.source}): {self.reason}; {veto}{reads}\n"
            f"       at {', '.join(self.stages) or 'no stage'}"
        )


@dataclass(frozen=True, slots=True)
class Explanation:
    """Update hooks in the order in which they are called; ``str()`` of it is a table to read.

    Attributes
    ----------
    hooks : tuple of ExplainedHook
        The order is the same at every stage.
    divisions : tuple of (str, str)
        For each optimizer of the latest step: its class, and how unscaling and clipping reached it.
    resolution : str
        When the host knew of the latest step, and why; see `StepOutcome.resolution`. Empty before it.
    """

    hooks: tuple[ExplainedHook, ...]
    divisions: tuple[tuple[str, str], ...] = ()
    resolution: str = ""

    def __str__(self) -> str:
        latest = [f"Latest step of {optimizer}: {division}." for optimizer, division in self.divisions]
        if self.resolution:
            latest.append(f"Latest outcome known to the host: {self.resolution}.")
        if not self.hooks:
            nothing = "No update hooks: gradients are zeroed, backward runs, every optimizer steps."
            return "\n".join([nothing, *latest])
        lines = ["Update hooks, in the order in which each stage calls them:", *map(str, self.hooks)]
        readers = ", ".join(hook.key for hook in self.hooks if hook.reads_grad)
        if readers:
            lines.append(f"Factors that are pending are divided out of .grad before {readers}.")
        lines.append(
            "Unscaling and clipping are folded into the step of an optimizer that takes a divisor along (fused=True, "
            "float32 gradients), and divided out in one pass before any other."
        )
        return "\n".join([*lines, *latest])


def explain_hooks(
    ordered: Sequence[tuple[TrainingUpdateHook, int]], overridden: Collection[str], outcome: StepOutcome | None
) -> Explanation:
    """Explain hooks that are given in order, each with the priority that put it there."""
    stepped = [optimizer for optimizer in outcome.optimizers if optimizer.stepped] if outcome else []
    return Explanation(
        hooks=tuple(_explained(hook, priority, overridden) for hook, priority in ordered),
        divisions=tuple((one.optimizer, one.division or "nothing to divide") for one in stepped),
        resolution=outcome.resolution if outcome else "",
    )


def _explained(hook: TrainingUpdateHook, priority: int, overridden: Collection[str]) -> ExplainedHook:
    whole = overrides(hook, "__call__")
    origin = provenance_of(hook)
    by_user = hook.state_key in overridden
    return ExplainedHook(
        key=hook.state_key,
        hook=type(hook).__name__,
        priority=priority,
        reason="the user's priority" if by_user else _REASONS.get(priority, "the hook's own priority"),
        stages=tuple(stage for method, stage in _STAGES.items() if whole or overrides(hook, method)),
        may_veto=hook.may_veto
        and (whole or overrides(hook, "before_optimizer_step") or overrides(hook, "before_batch")),
        reads_grad=takes_part_in_step(hook) and hook.reads_grad,
        source=f"{origin.distribution} {origin.version}" if origin else "no distribution",
    )
