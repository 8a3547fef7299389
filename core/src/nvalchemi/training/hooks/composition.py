"""What may be composed: update hooks that can be told apart, with priorities that mean one of them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from nvalchemi.errors import HookConflictError
from nvalchemi.training.hooks.update import TrainingUpdateHook

__all__ = ["checked_hook", "checked_priorities", "refuse_conflicts"]


def checked_hook(hook: object, position: int) -> TrainingUpdateHook:
    """Return an update hook, or say what the argument at `position` is instead."""
    if isinstance(hook, TrainingUpdateHook):
        return hook
    advice = "compose update hooks: subclasses of TrainingUpdateHook"
    if isinstance(hook, list | tuple):
        advice = "unpack it: TrainingUpdateOrchestrator(*hooks)"
    elif isinstance(hook, type) and issubclass(hook, TrainingUpdateHook):
        advice = f"make an instance: {hook.__name__}(...)"
    elif hasattr(hook, "frequency"):
        advice = "it is a plain hook; give it to the strategy beside the orchestrator, or call it yourself"
    elif isinstance(hook, str):
        advice = "names are for a strategy, TrainingStrategy(hooks=[...]); here give the hook itself"
    kind = f"the class {hook.__name__}" if isinstance(hook, type) else f"a {type(hook).__name__}"
    raise TypeError(f"Argument {position} of TrainingUpdateOrchestrator is {kind}, no update hook; {advice}.")


def refuse_conflicts(hooks: list[TrainingUpdateHook]) -> None:
    """Refuse hooks that exclude each other, are given twice, or cannot be told apart."""
    for place, hook in enumerate(hooks):
        for other in hooks[:place]:
            names = f"{type(other).__name__} and {type(hook).__name__}"
            if hook is other:
                raise HookConflictError(f"The same {type(hook).__name__} was given twice; give each instance once.")
            if hook.exclusive_family is not None and hook.exclusive_family == other.exclusive_family:
                raise HookConflictError(
                    f"{names} both belong to the family {hook.exclusive_family!r}, of which one can be active; "
                    "leave one of them out."
                )
            if hook.state_key == other.state_key:
                raise HookConflictError(
                    f"{names} cannot be told apart: both have the state key {hook.state_key!r}; "
                    "give them labels, hook.labelled('...'), or different settings."
                )


def checked_priorities(priorities: Mapping[str, int], hooks: list[TrainingUpdateHook]) -> Mapping[str, int]:
    """Return priorities by state key, or say which key no hook has."""
    keys = [hook.state_key for hook in hooks]
    for key, priority in priorities.items():
        if key not in keys:
            closest = difflib.get_close_matches(key, keys, n=1, cutoff=0.0)
            hint = f"did you mean {closest[0]!r}?" if closest else "no hooks are composed."
            raise HookConflictError(f"A priority is given for {key!r}, but no hook has that state key; {hint}")
        if type(priority) is not int:
            raise HookConflictError(f"The priority of {key!r} is {priority!r}; it must be an int.")
    return priorities
