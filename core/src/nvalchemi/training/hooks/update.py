"""The contract of update hooks, the order in which they act, and their two smallest members."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Self

from nvalchemi.training.stages import TrainingStage

if TYPE_CHECKING:
    from torch import Tensor

    from nvalchemi.hooks.context import TrainContext
    from nvalchemi.training.hooks.orchestrator import TrainingUpdateOrchestrator

__all__ = ["AlwaysVeto", "PassThrough", "TrainingUpdateHook", "UpdatePriority"]


class UpdatePriority(IntEnum):
    """When an update hook acts among the others: lower first, ties in the order of insertion.

    Examples
    --------
    >>> int(UpdatePriority.CLIP), UpdatePriority.CLIP.reason
    (30, 'the threshold is meant for true and finite gradients')
    """

    reason: str

    def __new__(cls, value: int, reason: str) -> Self:  # noqa: D102 - how Python makes members with attributes
        member = int.__new__(cls, value)
        member._value_ = value
        member.reason = reason
        return member

    ACCUMULATE = 10, "decides whether there is an update at all, so everybody else has to know"
    SCALE = 20, "gradients are true only once they are unscaled"
    CHECK_FINITE = 25, "looks for inf and nan before anything hides them"
    CLIP = 30, "the threshold is meant for true and finite gradients"
    SKIP_SPIKES = 40, "judges the step that would really be taken"
    DEFAULT = 50, "the default: after everything that shapes the step"


_STAGE_METHODS = ("setup", "before_batch", "transform_loss", "before_optimizer_step", "after_optimizer_step", "settled")
_LOOKS_LIKE_A_STAGE = re.compile("|".join(["(before|after|on)_.+", *(stage.name.lower() for stage in TrainingStage)]))


class TrainingUpdateHook:
    """A policy that takes part in the weight update.

    An author overrides the stage methods that are needed; the others do nothing. An orchestrator calls them in the
    order of `priority`, also after a veto, and tells them so.

    ========================= ========================================================================================
    method                    when, and what the return value means
    ========================= ========================================================================================
    `setup`                   once, before optimizers are built
    `before_batch`            False: keep the gradients instead of zeroing them
    `transform_loss`          the loss that the next hook sees; ``backward()`` runs on the last
    `before_optimizer_step`   False: no optimizer and no scheduler moves. Not called while a window is open
    `after_optimizer_step`    after the step, or after it was skipped
    `settled`                 once a window, when the host knows what happened; counters live here
    ========================= ========================================================================================

    Overriding ``__call__(ctx, stage, will_skip=False) -> (proceed, loss)`` instead stays legal.

    Attributes
    ----------
    name : str
        The class's name in snake case without "hook", unless the class sets its own.
    priority : int
        See `UpdatePriority`.
    exclusive_family : str or None
        Two members of one family cannot be composed.
    reads_grad : bool
        It looks at or changes ``.grad`` by itself. Such a hook finds unscaled gradients there (and, after clipping's
        priority, clipped ones). Set it to False only on a hook that never touches ``.grad``, where it would find the
        loss scale; the update can then stay folded.
    may_veto : bool
        It may veto, where it overrides a method that could. Set it to False on a hook that only prepares or measures
        there: `TrainingUpdateOrchestrator.explain` says so then, and a veto of it is an error.
    defers_veto : bool
        It can live with a decision that is still on the device, and may call ``ctx.defer_veto``.
    decides_alike : bool
        Given what all ranks know (``ctx.grad_norm``, norms of ``ctx.window``, whether gradients are finite, what was
        shared by ``ctx.share``, and its own settings), every rank comes to the same decision. If every hook that may
        veto says so, ranks that reduce their gradients need not exchange votes before the step.

    Examples
    --------
    >>> class HalveLoss(TrainingUpdateHook):
    ...     def transform_loss(self, ctx, loss):
    ...         return loss * 0.5
    >>> HalveLoss.name, int(HalveLoss.priority)
    ('halve_loss', 50)
    """

    name: ClassVar[str] = "training_update"
    priority: ClassVar[int] = UpdatePriority.DEFAULT
    exclusive_family: ClassVar[str | None] = None
    # Not annotated: pydantic would take an annotation in a base for a field.
    may_veto = True
    reads_grad = True
    defers_veto = False
    decides_alike = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" not in cls.__dict__:
            cls.name = snake_case(cls.__name__)
        _refuse_unknown_stage_methods(cls)
        if isinstance(cls.priority, bool) or not isinstance(cls.priority, int):
            raise TypeError(f"{cls.__name__}.priority is {cls.priority!r}; it must be an int, see UpdatePriority.")

    def setup(self, ctx: TrainContext) -> None:
        """Prepare, before optimizers are built."""

    def before_batch(self, ctx: TrainContext, *, will_skip: bool) -> bool:
        """Return whether gradients may be zeroed; `will_skip` says that an earlier hook has vetoed it."""
        return True

    def transform_loss(self, ctx: TrainContext, loss: Tensor) -> Tensor:
        """Return the loss to go on with: a tensor with a graph.

        Under loss scaling the loss comes scaled. Multiply it; a term to be added belongs into ``loss_fn``, where it is
        scaled with the rest.
        """
        return loss

    def before_optimizer_step(self, ctx: TrainContext, *, will_skip: bool) -> bool:
        """Return whether the optimizers may step; `will_skip` says that an earlier hook has vetoed it."""
        return True

    def after_optimizer_step(self, ctx: TrainContext, *, skipped: bool) -> None:
        """React to the step; `skipped` says that no optimizer moved."""

    def settled(self, ctx: TrainContext, *, skipped: bool) -> None:
        """Count what happened; the host knows it now."""

    def __call__(self, ctx: TrainContext, stage: TrainingStage, will_skip: bool = False) -> tuple[bool, Tensor | None]:
        """Call the method of `stage` and return ``(proceed, loss)``."""
        if stage is TrainingStage.SETUP:
            self.setup(ctx)
        elif stage is TrainingStage.BEFORE_BATCH:
            return self.before_batch(ctx, will_skip=will_skip), ctx.loss
        elif stage is TrainingStage.DO_BACKWARD and ctx.loss is not None:
            return True, self.transform_loss(ctx, ctx.loss)
        elif stage is TrainingStage.DO_OPTIMIZER_STEP and ctx.window_complete:
            return self.before_optimizer_step(ctx, will_skip=will_skip), ctx.loss
        elif stage is TrainingStage.AFTER_OPTIMIZER_STEP:
            self.after_optimizer_step(ctx, skipped=will_skip)
        return True, ctx.loss

    @property
    def label(self) -> str | None:
        """The name that the user gave this instance, if any."""
        return getattr(self, "_label", None)

    def labelled(self, label: str | None) -> Self:
        """Give this instance a name of its own (None: its class's name again) and return it."""
        object.__setattr__(self, "_label", label)  # a pydantic hook refuses attributes that are no fields
        return self

    @property
    def state_key(self) -> str:
        """What identifies this instance among others: its label, or its class's name.

        A class of which several make sense in one run overrides this with what tells them apart.
        """
        return self.label or self.name

    def __add__(self, other: object) -> TrainingUpdateOrchestrator:
        return _compose(self, other)

    def __radd__(self, other: object) -> TrainingUpdateOrchestrator:
        return _compose(self) if other == 0 else _compose(other, self)  # sum() starts from 0


def overrides(hook: TrainingUpdateHook, method: str) -> bool:
    """Return whether a hook's class has its own version of a method."""
    own: Callable[..., Any] = getattr(type(hook), method)
    return own is not getattr(TrainingUpdateHook, method)


def takes_part_in_step(hook: TrainingUpdateHook) -> bool:
    """Return whether a hook may decide on the step or look at gradients: it overrides something that could."""
    return any(overrides(hook, method) for method in ("before_optimizer_step", "after_optimizer_step", "__call__"))


def _compose(*hooks: object) -> TrainingUpdateOrchestrator:
    # The orchestrator stands one layer above, so it is asked for at the public door, when it is needed.
    from nvalchemi.training.hooks import TrainingUpdateOrchestrator

    return TrainingUpdateOrchestrator(*hooks)  # type: ignore[arg-type]


def snake_case(name: str) -> str:
    """Return the name of a hook's class in snake case, without "hook"."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name.removesuffix("Hook") or name)
    return words.lower()


def _refuse_unknown_stage_methods(cls: type) -> None:
    for name, value in cls.__dict__.items():
        if name.startswith("_") or name in _STAGE_METHODS or not callable(value):
            continue
        closest = difflib.get_close_matches(name, _STAGE_METHODS, n=1, cutoff=0.8)
        if closest or _LOOKS_LIKE_A_STAGE.fullmatch(name):
            closest = closest or difflib.get_close_matches(name, _STAGE_METHODS, n=1, cutoff=0.0)
            raise TypeError(
                f"{cls.__name__}.{name} looks like a stage method, but update hooks have none of that name, so it "
                f"would never be called; did you mean {closest[0]}? There are {', '.join(_STAGE_METHODS)}."
            )


class PassThrough(TrainingUpdateHook):
    """Takes part in everything and changes nothing."""

    reads_grad = False


class AlwaysVeto(TrainingUpdateHook):
    """Lets no optimizer step.

    Examples
    --------
    >>> AlwaysVeto().before_optimizer_step(None, will_skip=False)
    False
    """

    reads_grad = False
    decides_alike = True

    def before_optimizer_step(self, ctx: TrainContext, *, will_skip: bool) -> bool:
        """Veto."""
        return False
