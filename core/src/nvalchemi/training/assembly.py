"""From what a user gives as hooks to a registry with one orchestrator in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvalchemi.errors import HookConflictError
from nvalchemi.hooks.plugins import ActivatedHook, activate_hooks
from nvalchemi.hooks.plugins.switches import TRACE, is_on
from nvalchemi.hooks.registry import HookRegistry
from nvalchemi.metadata import provenance_of
from nvalchemi.training.hook_states import NamedHook
from nvalchemi.training.hooks.orchestrator import TrainingUpdateOrchestrator
from nvalchemi.training.hooks.update import TrainingUpdateHook, snake_case
from nvalchemi.training.stages import TrainingStage
from nvalchemi.training.trace import HookTrace, TraceReport

if TYPE_CHECKING:
    from nvalchemi.hooks.context import TrainContext

__all__ = ["Assembly", "assemble"]

_SLOTS = (TrainingStage.DO_BACKWARD, TrainingStage.DO_OPTIMIZER_STEP)


@dataclass(frozen=True)
class Assembly:
    """The hooks of a run, put together."""

    registry: HookRegistry
    orchestrator: TrainingUpdateOrchestrator
    activated: tuple[ActivatedHook, ...]

    def providers(self, protocol: Any) -> list[Any]:
        """Return all hooks, update hooks included, that have an optional power."""
        everything = [*self.orchestrator.iter_hooks(), *self.registry]
        return [hook for hook in everything if isinstance(hook, protocol)]

    def named_hooks(self) -> list[NamedHook]:
        """Return every hook with the key under which a checkpoint knows it, update hooks first."""
        given = {id(one.hook): one for one in self.activated}
        named = []
        for child in self.orchestrator.iter_hooks():
            one = given.get(id(child)) or ActivatedHook(None, child, provenance_of(child))
            named.append(NamedHook(child.state_key, child, one.name or child.name, one.provenance))
        for one in self.activated:
            if not isinstance(one.hook, TrainingUpdateHook | TrainingUpdateOrchestrator):
                name = one.name or snake_case(type(one.hook).__name__)
                named.append(NamedHook(one.label or name, one.hook, name, one.provenance))
        return named


def assemble(hooks: object, priorities: Mapping[str, int] | None, *, lazy: bool = False) -> Assembly:
    """Activate hooks by name, gather the update hooks in one orchestrator, and register everything.

    Parameters
    ----------
    hooks : object
        See `nvalchemi.hooks.activate_hooks`.
    priorities : mapping of str to int, optional
        See `TrainingUpdateOrchestrator.with_priority`.
    lazy : bool
        The orchestrator is to be lazy, also if the one that was given is not.

    Raises
    ------
    HookConflictError
        A ``ValueError``: two orchestrators, or update hooks that cannot be composed.
    HookRegistrationError
        A ``ValueError``: a plain hook that the registry refuses.
    """
    activated = activate_hooks(hooks)
    orchestrator = _orchestrator(activated, priorities, lazy)
    registry = HookRegistry(TrainingStage, slots=_SLOTS, owners_last=(TrainingStage.SETUP,))
    report = TraceReport() if is_on(TRACE) else None
    if report is not None:
        registry.register(report)  # first, so that it is closed last
    for one in activated:
        if not isinstance(one.hook, TrainingUpdateHook | TrainingUpdateOrchestrator):
            registry.register(one.hook)  # type: ignore[arg-type]  # the registry checks it
    taken = [slot for slot in _SLOTS if registry.owner(slot) is not None]
    empty = next(orchestrator.iter_hooks(), None) is None
    registry.register(_Remainder(orchestrator, taken) if taken and empty else orchestrator)  # type: ignore[arg-type]
    if report is not None:
        report.trace = HookTrace(registry).__enter__()
    return Assembly(registry, orchestrator, tuple(activated))


def _orchestrator(
    activated: list[ActivatedHook], priorities: Mapping[str, int] | None, lazy: bool
) -> TrainingUpdateOrchestrator:
    composed = [one.hook for one in activated if isinstance(one.hook, TrainingUpdateOrchestrator)]
    if len(composed) > 1:
        raise HookConflictError(
            f"{len(composed)} orchestrators were given, but a strategy has one; compose them with +: first + second."
        )
    bare = [(one.hook, one.label) for one in activated if isinstance(one.hook, TrainingUpdateHook)]
    if composed and not bare and not priorities and composed[0].lazy >= lazy:
        return composed[0]
    labels = [(hook, hook.label) for hook, _ in bare]
    for hook, label in bare:
        if label is not None:
            hook.labelled(label)
    try:
        return TrainingUpdateOrchestrator(*composed, *(hook for hook, _ in bare), priorities=priorities, lazy=lazy)
    except (TypeError, ValueError):  # refused: the hooks get back the labels they came with
        for hook, label in labels:
            hook.labelled(label)
        raise


class _Remainder:
    """An orchestrator without hooks, at the stages that no plain hook has taken over."""

    frequency = 1
    stage = None

    def __init__(self, orchestrator: TrainingUpdateOrchestrator, taken: list[TrainingStage]) -> None:
        self._orchestrator = orchestrator
        self._taken = taken

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        return self._orchestrator._runs_on_stage(stage) and stage not in self._taken

    def __call__(self, ctx: TrainContext, stage: TrainingStage) -> None:
        self._orchestrator(ctx, stage)
