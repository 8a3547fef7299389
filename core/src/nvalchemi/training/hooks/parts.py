"""Which hook acts at which stage: decided when hooks are composed, and the same at every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from nvalchemi.training.hooks.update import TrainingUpdateHook, overrides, takes_part_in_step

__all__ = ["Part", "Parts", "Voter"]


class Part(NamedTuple):
    """A hook that does something at a stage.

    Attributes
    ----------
    hook : TrainingUpdateHook
        The hook.
    whole : bool
        It overrides ``__call__``, which is called then instead of the method of the stage.
    concerned : bool
        It may act on how a step ended. If it does not know of deferred vetoes, it is told of an earlier one first.
    """

    hook: TrainingUpdateHook
    whole: bool
    concerned: bool


class Voter(NamedTuple):
    """A hook that takes part in the step.

    Attributes
    ----------
    hook, whole
        See `Part`.
    decides : bool
        It is asked whether to step; otherwise it may look at gradients later on.
    """

    hook: TrainingUpdateHook
    whole: bool
    decides: bool


_Stage: TypeAlias = tuple[Part, ...]


class Parts:
    """The parts of a composition, stage by stage, in the order of its hooks.

    A hook for which a stage does nothing is left out there; calling it would change nothing.

    Parameters
    ----------
    hooks : sequence of TrainingUpdateHook
        In the order in which they act.

    Examples
    --------
    >>> from nvalchemi.training.hooks.update import AlwaysVeto, PassThrough
    >>> parts = Parts([PassThrough(), AlwaysVeto()])
    >>> [voter.hook.name for voter in parts.voting], parts.before_batch
    (['always_veto'], ())
    """

    def __init__(self, hooks: Sequence[TrainingUpdateHook]) -> None:
        self.setup = _overriding(hooks, "setup")
        self.before_batch = _overriding(hooks, "before_batch")
        self.transform_loss = _overriding(hooks, "transform_loss")
        deciding = {id(part.hook) for part in _overriding(hooks, "before_optimizer_step")}
        self.voting = tuple(
            Voter(hook, overrides(hook, "__call__"), id(hook) in deciding) for hook in hooks if takes_part_in_step(hook)
        )
        self.after_optimizer_step = _overriding(hooks, "after_optimizer_step")
        self.settled = tuple(hook for hook in hooks if overrides(hook, "settled"))


def _overriding(hooks: Sequence[TrainingUpdateHook], method: str) -> _Stage:
    parts = (
        Part(hook, overrides(hook, "__call__"), takes_part_in_step(hook) or overrides(hook, "settled"))
        for hook in hooks
    )
    return tuple(part for part in parts if part.whole or overrides(part.hook, method))
