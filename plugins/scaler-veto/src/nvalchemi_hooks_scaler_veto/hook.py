"""The finite check as an update hook: one veto for all optimizers, and an end to a run that only skips."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from nvalchemi.errors import NonFiniteGradientError
from nvalchemi.training.hooks import TrainingUpdateHook, UpdatePriority
from nvalchemi_hooks_scaler_veto import kernels

if TYPE_CHECKING:
    from nvalchemi.hooks import TrainContext

__all__ = ["GradScalerVetoHook"]

_COUNTERS = ("consecutive_skips", "total_skips")


class GradScalerVetoHook(TrainingUpdateHook):
    r"""Let no optimizer step on a gradient with an inf or a nan.

    The step is vetoed where any gradient :math:`g` has an element with :math:`|g_i| \not< \infty`. A loss scaler, if
    there is one, backs off once; without one the hook checks all the same. Where torch's rule lets every optimizer skip
    for itself, here all of them wait, and so do schedulers and averages. With several ranks all skip, or none does.

    Parameters
    ----------
    max_consecutive_skips : int or None
        At least 1: stop the run after so many windows in a row without finite gradients. 25 back-offs bring the usual
        scale of 65536 down to 0.002; gradients that are still not finite are not too large, they are broken. None never
        stops.

    Attributes
    ----------
    consecutive_skips, total_skips : int
        Windows with gradients that are not finite: in a row up to now, and in all.

    Raises
    ------
    ValueError
        At construction: `max_consecutive_skips` is not an int of 1 or above.
    NonFiniteGradientError
        After the step: the limit is reached. It names the first parameter whose gradient is not finite, in the order of
        the models, and the scale.

    References
    ----------
    P. Micikevicius et al., "Mixed Precision Training", ICLR 2018, https://arxiv.org/abs/1710.03740.

    Examples
    --------
    >>> import torch
    >>> from nvalchemi.hooks import TrainContext
    >>> from nvalchemi.training import TrainingStage
    >>> from nvalchemi.training.hooks import TrainingUpdateOrchestrator
    >>> hook = GradScalerVetoHook()
    >>> update = TrainingUpdateOrchestrator(hook)
    >>> weight = torch.nn.Parameter(torch.tensor(1.0))
    >>> with TrainContext(optimizers=[torch.optim.SGD([weight], lr=1.0)]) as ctx:
    ...     update(ctx, TrainingStage.BEFORE_BATCH)
    ...     ctx.loss = weight * torch.inf
    ...     update(ctx, TrainingStage.DO_BACKWARD)
    ...     update(ctx, TrainingStage.DO_OPTIMIZER_STEP)
    ...     update(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
    >>> weight.item(), update.last_outcome.vetoes[0].reason, hook.consecutive_skips
    (1.0, 'gradients are not finite', 1)
    """

    name: ClassVar[str] = "scaler_veto"
    priority: ClassVar[int] = UpdatePriority.CHECK_FINITE
    reads_grad = False
    defers_veto = True
    decides_alike = True

    def __init__(self, *, max_consecutive_skips: int | None = 25) -> None:
        limit = max_consecutive_skips
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ValueError(
                f"GradScalerVetoHook: max_consecutive_skips is {limit!r}; "
                "give an int of 1 or above, or None to go on for ever"
            )
        self.max_consecutive_skips = limit
        self.consecutive_skips = self.total_skips = 0

    def before_optimizer_step(self, ctx: TrainContext, *, will_skip: bool) -> bool:
        """Veto on the device if any gradient is not finite."""
        if ctx.window is None:
            raise RuntimeError(
                "GradScalerVetoHook.before_optimizer_step needs the update window of an orchestrator, but ctx.window "
                "is None; compose the hook in a TrainingUpdateOrchestrator and call that at every stage of the batch."
            )
        ctx.defer_veto_nonfinite("gradients are not finite")
        return True

    def after_optimizer_step(self, ctx: TrainContext, *, skipped: bool) -> None:
        """Have the host know now, while the gradients are there to be named, if one more skip is the last."""
        if self.max_consecutive_skips is not None and self.consecutive_skips + 1 >= self.max_consecutive_skips:
            _ = ctx.step_skipped

    def capture_key(self, ctx: TrainContext) -> Hashable | None:
        """Return None, a batch not to be replayed, if one more skip is the last: the host has to look then."""
        limit = self.max_consecutive_skips
        return None if limit is not None and self.consecutive_skips + 1 >= limit else ()

    def captured(self, ctx: TrainContext) -> None:
        """Nothing is left that a replay would need."""

    def replayed(self, ctx: TrainContext, left: None) -> None:
        """Do nothing: `settled` counts."""

    def settled(self, ctx: TrainContext, *, skipped: bool) -> None:
        """Count, and stop the run where nothing but skipping is left: on all ranks, which agreed on the outcome."""
        outcome = ctx.outcome
        if outcome is None or not outcome.found_inf:
            self.consecutive_skips = 0
            return
        self.consecutive_skips += 1
        self.total_skips += 1
        if self.max_consecutive_skips is not None and self.consecutive_skips >= self.max_consecutive_skips:
            raise NonFiniteGradientError(self._diagnosis(ctx))

    def state_dict(self) -> dict[str, int]:
        """Return the counters."""
        return {name: getattr(self, name) for name in _COUNTERS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the counters.

        Raises
        ------
        ValueError
            They are not those that `state_dict` returns; nothing is changed.
        """
        if set(state) != set(_COUNTERS) or any(type(count) is not int or count < 0 for count in state.values()):
            raise ValueError(
                f"GradScalerVetoHook: the state is {dict(state)!r}; "
                f"give {' and '.join(_COUNTERS)}, each an int from 0 on"
            )
        self.consecutive_skips, self.total_skips = (state[name] for name in _COUNTERS)

    def _diagnosis(self, ctx: TrainContext) -> str:
        named = ctx.gradients
        place = kernels.first_nonfinite(list(named.values()))
        culprit = "on this rank no parameter of ctx.models has an inf or a nan in its gradient"
        if place is not None:
            culprit = f"the first parameter with an inf or a nan in its gradient is {list(named)[place]!r}"
        scale = ""
        if hasattr(ctx.grad_scaler, "get_scale"):
            scale = f" The loss scale is now {ctx.grad_scaler.get_scale():g}."
        return (
            f"GradScalerVetoHook: gradients were not finite in {self.consecutive_skips} windows in a row "
            f"(max_consecutive_skips={self.max_consecutive_skips}); {culprit}.{scale} Look at the loss and the data of "
            "this batch, lower the learning rate, or raise max_consecutive_skips."
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_consecutive_skips={self.max_consecutive_skips!r})"
