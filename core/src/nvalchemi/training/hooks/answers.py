"""What hooks answer when they are asked whether to proceed: a real bool, of a hook that may say so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvalchemi.errors import HookContractError

if TYPE_CHECKING:
    from nvalchemi.training.hooks.update import TrainingUpdateHook
    from nvalchemi.training.stages import TrainingStage

__all__ = ["checked_pair", "checked_proceed"]


def checked_pair(hook: TrainingUpdateHook, answer: object, stage: TrainingStage) -> tuple[Any, Any]:
    """Return what a hook that overrides ``__call__`` has answered, or say that it is no pair."""
    if not (isinstance(answer, tuple) and len(answer) == 2):
        raise HookContractError(
            f"{type(hook).__name__} returned {answer!r} at {stage.name}; __call__ returns (proceed, loss)."
        )
    return answer


def checked_proceed(hook: TrainingUpdateHook, proceed: object, stage: TrainingStage) -> bool:
    """Return whether a hook lets the update proceed, or say what is wrong with its answer."""
    if type(proceed) is not bool:
        raise HookContractError(
            f"{type(hook).__name__} returned {proceed!r} ({type(proceed).__name__}) at {stage.name}; whether to "
            "proceed is True or False, a real bool. For a decision that is still a tensor use ctx.defer_veto."
        )
    if not proceed and not hook.may_veto:
        raise HookContractError(
            f"{type(hook).__name__} vetoed at {stage.name}, although its may_veto is False; leave may_veto out, or "
            "return True."
        )
    return proceed
