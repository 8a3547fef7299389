"""Gradient accumulation as an update hook: which batches make one step, and what each of them counts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, distributed

from nvalchemi.errors import CheckpointWarning
from nvalchemi.training.hooks import Shared, TrainingUpdateHook, UpdatePriority
from nvalchemi_hooks_grad_accum.quiet import adding_nothing, unheard
from nvalchemi_hooks_grad_accum.weights import Weight, checked_weight, weight_of

if TYPE_CHECKING:
    from nvalchemi.hooks import TrainContext

__all__ = ["GradientAccumulationHook"]

_STATE = {
    "steps": (int,),
    "batches": (int,),
    "total": (float,),
    "unit": (float, type(None)),
    "dropped": (int,),
    "torn": (bool,),
}
_ALL_DROPPED = "no micro-batch of the window had a finite loss"


class GradientAccumulationHook(TrainingUpdateHook):
    r"""Take one optimizer step for `steps` batches, as if they were one.

    With losses :math:`L_i` that are means over their batches, the gradient of a window is
    :math:`\sum_i w_i \nabla L_i / \sum_i w_i`. Without `weight` all :math:`w_i` are 1. The last window of an epoch is
    stepped with what it holds, also where the loader does not know its length. Scale, clipping, average and schedulers
    move once a window. On several ranks the sums are those of all of them, and gradients are reduced once, in the last
    micro-batch (FSDP2 is untested on a GPU, like everything here).

    Parameters
    ----------
    steps : int
        At least 1: batches in a window.
    weight : str, callable or None
        What a batch counts for, in samples or atoms for example: a function of the batch that is defined in a module,
        its import path ``"package.module:function"``, or the name of an entry or an attribute of the batch. It gives a
        number above 0, or a tensor that is added up (on a GPU the host waits for it). None: all count the same.
    on_nonfinite : {"veto", "drop"}
        What to do about a micro-batch with a nan. ``"veto"``: the whole window is skipped. ``"drop"``: a micro-batch
        whose loss is not finite is left out and the others are their mean; the host reads every loss for that.
        A gradient that is not finite though its loss is still vetoes.

    Attributes
    ----------
    batches : int
        Micro-batches in the open window so far; 0 between windows.
    dropped : int
        Micro-batches that were left out, in all.

    Raises
    ------
    ValueError, TypeError
        At construction: a setting is not what it may be; in a batch: its weight is not.

    Examples
    --------
    >>> from nvalchemi.hooks import TrainContext
    >>> from nvalchemi.training import TrainingStage
    >>> from nvalchemi.training.hooks import TrainingUpdateOrchestrator
    >>> update = TrainingUpdateOrchestrator(GradientAccumulationHook(steps=4))
    >>> weight = torch.nn.Parameter(torch.tensor(0.0))
    >>> optimizer = torch.optim.SGD([weight], lr=1.0)
    >>> for count in range(1, 7):  # six batches: a window of four, and one of two
    ...     with TrainContext(optimizers=[optimizer], is_last_batch=count == 6) as ctx:
    ...         update(ctx, TrainingStage.BEFORE_BATCH)
    ...         ctx.loss = weight * count
    ...         update(ctx, TrainingStage.DO_BACKWARD)
    ...         update(ctx, TrainingStage.DO_OPTIMIZER_STEP)
    ...         update(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
    ...     if not ctx.step_skipped:
    ...         print(weight.item())
    -2.5
    -8.0
    """

    name: ClassVar[str] = "grad_accum"
    priority: ClassVar[int] = UpdatePriority.ACCUMULATE
    exclusive_family: ClassVar[str | None] = "accumulation"
    looks_ahead = True
    reads_grad = False
    defers_veto = True
    decides_alike = True

    def __init__(self, *, steps: int, weight: Weight = None, on_nonfinite: Literal["veto", "drop"] = "veto") -> None:
        if type(steps) is not int or steps < 1:
            raise ValueError(f"GradientAccumulationHook: steps is {steps!r}; give an int of 1 or above.")
        if on_nonfinite not in ("veto", "drop"):
            raise ValueError(f'GradientAccumulationHook: on_nonfinite is {on_nonfinite!r}; give "veto" or "drop".')
        self.steps, self.weight, self.on_nonfinite = steps, weight, on_nonfinite
        self._weigh = checked_weight(weight)
        self.batches = self.dropped = 0
        self._total = 0.0  # what the micro-batches of the window count for
        self._unit = (
            None if weight is not None else 1.0
        )  # about what one of them counts for, on every rank; None: not known yet
        self._torn = False  # a batch is under way, or was left in its middle
        self._divided = 1.0  # what this rank alone has normalised by
        self._shared: Shared | None = None
        self._held_back = False  # models have been told not to reduce, and have not reduced since

    def before_batch(self, ctx: TrainContext, *, will_skip: bool) -> bool:
        """Say whether the window ends with this batch; keep the gradients of those before it."""
        if self._torn:
            self._let_go(ctx)
        self._torn = True
        if self.batches == 0:
            self._total = 0.0
        if self.batches + 1 < self.steps and not ctx.is_last_batch:
            ctx.window_complete = False
            self._held_back = True
            for context in unheard(ctx.models):
                ctx.enter_batch_context(context)
        return self.batches == 0

    def transform_loss(self, ctx: TrainContext, loss: Tensor) -> Tensor:
        """Give the loss its share of the window; at the last, say what the window holds."""
        weight = 1.0 if self._weigh is None else weight_of(ctx.batch, self._weigh)
        if self._unit is None and not _several_ranks():
            self._unit = _power_of_two(weight)
        if self.on_nonfinite == "drop" and not loss.detach().isfinite().item():
            ctx.enter_batch_context(adding_nothing(loss, ctx.untouched_optimizers))
            self.dropped += 1
        else:
            self._total += weight
        if ctx.window_complete:
            self._normalise(ctx)
        return loss / self.steps if self._weigh is None else loss * (weight / self._nominal)

    def before_optimizer_step(self, ctx: TrainContext, *, will_skip: bool) -> bool:
        """Veto a window that holds a nan, or nothing."""
        shared, self._shared = self._shared, None
        if shared is None and self._total == 0.0:
            ctx.note_veto(_ALL_DROPPED)
            return False
        if shared is not None:
            held = shared.mean
            ctx.defer_veto(held == 0, _ALL_DROPPED)
            _window(ctx).normalise(torch.where(held > 0, held / (self._nominal * self._divided), 1.0))
            if self._unit is None and (total := held.item()) > 0:
                self._unit = _power_of_two(total / (self.batches + 1))
        ctx.defer_veto_nonfinite("a gradient of the window is not finite")
        return True

    def after_optimizer_step(self, ctx: TrainContext, *, skipped: bool) -> None:
        """Count the batch, or begin a new window."""
        self._torn = False
        self._held_back &= not ctx.window_complete
        self.batches = 0 if ctx.window_complete else self.batches + 1

    def state_dict(self) -> dict[str, Any]:
        """Return where the window is, as plain data.

        In the middle of a window every rank has gradients of its own, of which a checkpoint holds those of one; so with
        several ranks the window is begun anew after a load, and a `CheckpointWarning` says so.
        """
        lost = self.batches > 0 and _several_ranks()
        if lost:
            warnings.warn(
                f"The state is that of a window of which {self.batches} of {self.steps} micro-batches are behind, and "
                "each rank holds its own part of their gradients; after loading they are missing from the step. Save "
                "when a window has ended, where hook.batches is 0, to lose none.",
                CheckpointWarning,
                stacklevel=2,
            )
        return {
            "steps": self.steps,
            "batches": self.batches,
            "total": self._total,
            "unit": self._unit,
            "dropped": self.dropped,
            "torn": self._torn or lost,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over where the window is.

        Raises
        ------
        ValueError
            It is no state of this hook, or its window is open and of another number of `steps`; nothing is changed.
        """
        fits = set(state) == set(_STATE) and all(type(state[key]) in kinds for key, kinds in _STATE.items())
        if not fits or state["batches"] < 0:
            raise ValueError(
                f"GradientAccumulationHook: the state is {dict(state)!r}; give {', '.join(_STATE)}, as state_dict does."
            )
        if state["batches"] and state["steps"] != self.steps:
            raise ValueError(
                f"GradientAccumulationHook: the state is that of an open window of {state['steps']} batches, but steps "
                f"is {self.steps}; go on with steps={state['steps']}, or save when the window has ended."
            )
        self.batches, self.dropped, self._torn = state["batches"], state["dropped"], state["torn"]
        self._total, self._unit, self._shared = state["total"], state["unit"], None

    @property
    def _nominal(self) -> float:
        """What losses are divided by before it is known what the window holds; the same on every rank.

        It differs from 1 by a power of two for each micro-batch, so that gradients keep their size and their digits.
        """
        return self.steps * (self._unit or 1.0)

    def _normalise(self, ctx: TrainContext) -> None:
        """Divide by what the window holds, where that is not what was expected."""
        held = self._total / self._nominal
        self._divided = held if held > 0.0 else 1.0
        if self._divided != 1.0:
            _window(ctx).normalise(self._divided)
        if _several_ranks() and (self._weigh is not None or self.on_nonfinite == "drop"):
            self._shared = ctx.share(self._total)

    def _let_go(self, ctx: TrainContext) -> None:
        """Forget the window: an error has left one of its batches in its middle, its gradients half added perhaps.

        Raises
        ------
        RuntimeError
            FSDP2 holds gradients of that window where nobody can reach them.
        """
        if self._held_back and any(hasattr(model, "set_requires_gradient_sync") for model in ctx.models.values()):
            raise RuntimeError(
                f"An error has left a window of {self.steps} micro-batches half-way, and FSDP2 holds gradients of it "
                "that nobody can clear: the next step would take them in. Go on in a new process, from a checkpoint."
            )
        for optimizer in ctx.untouched_optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.batches, self._shared = 0, None

    def __repr__(self) -> str:
        settings = f"steps={self.steps!r}, weight={self.weight!r}, on_nonfinite={self.on_nonfinite!r}"
        return f"{type(self).__name__}({settings})"


def _window(ctx: TrainContext) -> Any:
    if ctx.window is None:
        raise RuntimeError(
            "GradientAccumulationHook needs the update window of an orchestrator, but ctx.window is None; compose the "
            "hook in a TrainingUpdateOrchestrator and call that at every stage of the batch."
        )
    return ctx.window


def _several_ranks() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _power_of_two(number: float) -> float:
    return 2.0 ** round(math.log2(number))
