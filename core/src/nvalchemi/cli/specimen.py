"""What a hook is, found by asking one: kind, priority, stages and optional powers."""

from __future__ import annotations

from dataclasses import dataclass

from nvalchemi.hooks import (
    CheckpointableHook,
    Closable,
    Enterable,
    HookRegistry,
    ProvidesAveragedModel,
    ProvidesInferenceContext,
)
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator

__all__ = ["Specimen", "examine"]

_POWERS: tuple[tuple[type, str], ...] = (
    (CheckpointableHook, "keeps state for a checkpoint"),
    (Enterable, "is entered before training and exited after it"),
    (Closable, "is closed after training"),
    (ProvidesAveragedModel, "keeps an averaged model"),
    (ProvidesInferenceContext, "sets the precision of validation"),
)


@dataclass(frozen=True, slots=True)
class Specimen:
    """What there is to say of a hook that was made.

    Attributes
    ----------
    kind : str
        ``"update hook"`` or ``"plain hook"``.
    cls : str
        Its class, ``module:Class``.
    priority : int or None
        Of an update hook.
    priority_reason : str
        Why that priority.
    frequency : int or None
        Of a plain hook.
    stages : tuple of str
        Where it does something.
    powers : tuple of str
        What it may do beyond being called.
    """

    kind: str
    cls: str
    priority: int | None
    priority_reason: str
    frequency: int | None
    stages: tuple[str, ...]
    powers: tuple[str, ...]


def examine(hook: object) -> Specimen:
    """Say what a hook is.

    Raises
    ------
    TypeError, ValueError
        It is none: no orchestrator and no registry would take it. The message says why.
    """
    cls = f"{type(hook).__module__}:{type(hook).__qualname__}"
    powers = tuple(words for protocol, words in _POWERS if isinstance(hook, protocol))
    if isinstance(hook, TrainingUpdateHook):
        [explained] = TrainingUpdateOrchestrator(hook).explain().hooks
        powers = (*_powers_of_update(hook, explained.may_veto, explained.reads_grad), *powers)
        return Specimen("update hook", cls, explained.priority, explained.reason, None, explained.stages, powers)
    registry = HookRegistry(TrainingStage)
    registry.register(hook)  # type: ignore[arg-type]  # the registry checks it
    stages = tuple(stage.name for stage in TrainingStage if registry.hooks_at(stage))
    return Specimen("plain hook", cls, None, "", getattr(hook, "frequency", None), stages, powers)


def _powers_of_update(hook: TrainingUpdateHook, may_veto: bool, reads_grad: bool) -> list[str]:
    said = {
        "may veto": may_veto,
        "may leave its veto on the device": hook.defers_veto,
        "decides the same on every rank": hook.decides_alike and may_veto,
        "reads gradients": reads_grad,
        f"excludes others of the family {hook.exclusive_family!r}": hook.exclusive_family is not None,
    }
    return [words for words, holds in said.items() if holds]
