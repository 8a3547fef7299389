"""Gradient clipping as an update hook: measure, ask for a division, veto what is not finite."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from nvalchemi.errors import NonFiniteGradientError
from nvalchemi.training.hooks import TrainingUpdateHook, UpdatePriority
from nvalchemi_hooks_grad_clip import kernels
from nvalchemi_hooks_grad_clip.refusal import refusal
from nvalchemi_hooks_grad_clip.thresholds import checked_switch, checked_threshold

if TYPE_CHECKING:
    from nvalchemi.hooks import TrainContext

__all__ = ["GradientClipHook"]

_COUNTERS = ("clipped_steps", "measured_steps")


class GradientClipHook(TrainingUpdateHook):
    r"""Clip the gradients of a window to a norm, once, just before the step.

    With the norm :math:`n` of the true (unscaled) gradients, every gradient becomes
    :math:`g / \max(1, (n + 10^{-6}) / n_{max})`. The division is left to whoever divides anyway: with a fused
    optimizer it costs no pass over memory. A norm that is not finite, or that overflows though each gradient is finite,
    vetoes the step of all optimizers, and makes a loss scale back off.

    Parameters
    ----------
    max_norm : float
        Above 0. inf measures without clipping.
    norm_type : float
        2.0, 1.0, inf or any other order above 0.
    clip_value : float, optional
        Above 0: afterwards, cut every element to ``[-clip_value, clip_value]``. Gradients are then divided and cut in
        ``.grad``, so the update is not folded.
    per_optimizer : bool
        Clip the gradients of each optimizer by their own norm, not all by the global one.
    error_if_nonfinite : bool
        Raise where a norm that is not finite would veto. The host then waits for the device once more.

    Attributes
    ----------
    last_norm, last_norms : float, tuple of float
        Norms before clipping.
    clipped_steps, measured_steps : int
        How many steps were changed by clipping, out of how many windows; vetoed ones are measured, never clipped.

    Raises
    ------
    ValueError
        At construction: a threshold that is 0 or below, nan, a bool or no number.
    NonFiniteGradientError
        At the step, with `error_if_nonfinite`, before any optimizer moves.

    References
    ----------
    R. Pascanu, T. Mikolov and Y. Bengio, "On the difficulty of training recurrent neural networks", ICML 2013,
    https://arxiv.org/abs/1211.5063.

    Examples
    --------
    >>> from nvalchemi.hooks import TrainContext
    >>> from nvalchemi.training import TrainingStage
    >>> from nvalchemi.training.hooks import TrainingUpdateOrchestrator
    >>> hook = GradientClipHook(max_norm=1.0)
    >>> update = TrainingUpdateOrchestrator(hook)
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> with TrainContext(optimizers=[torch.optim.SGD([weight], lr=1.0)]) as ctx:
    ...     update(ctx, TrainingStage.BEFORE_BATCH)
    ...     ctx.loss = weight @ torch.tensor([3.0, 4.0])
    ...     update(ctx, TrainingStage.DO_BACKWARD)
    ...     update(ctx, TrainingStage.DO_OPTIMIZER_STEP)
    ...     update(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
    >>> weight.data, hook.last_norm, hook.clipped_steps
    (tensor([-0.6000, -0.8000]), 5.0, 1)
    """

    name: ClassVar[str] = "grad_clip"
    priority: ClassVar[int] = UpdatePriority.CLIP
    reads_grad = False  # an instance with a finite clip_value sets it
    defers_veto = True
    decides_alike = True

    def __init__(
        self,
        *,
        max_norm: float = 1.0,
        norm_type: float = 2.0,
        clip_value: float | None = None,
        per_optimizer: bool = False,
        error_if_nonfinite: bool = False,
    ) -> None:
        self.max_norm = checked_threshold("max_norm", max_norm, "give a number above 0, or inf to measure only")
        self.norm_type = checked_threshold("norm_type", norm_type, "give 2.0, 1.0, inf or another order above 0")
        if clip_value is not None:
            clip_value = checked_threshold("clip_value", clip_value, "give a number above 0, or None")
        self.clip_value = clip_value
        self.per_optimizer = checked_switch("per_optimizer", per_optimizer)
        self.error_if_nonfinite = checked_switch("error_if_nonfinite", error_if_nonfinite)
        self.reads_grad = clip_value is not None and math.isfinite(clip_value)
        self.clipped_steps = self.measured_steps = 0
        self._global: Any = None  # a Reading: a norm that the host comes to know with the step
        self._norms: list[Any] = []
        self._largest: Any = None
        self._reason = f"the norm of the gradients (order {norm_type:g}) is not finite"

    @property
    def state_key(self) -> str:
        """The label, or the name with what is special about the way of measuring; thresholds are free to change."""
        marks = [f"norm_{self.norm_type:g}"] * (self.norm_type != 2.0) + ["per_optimizer"] * self.per_optimizer
        marks += ["measure"] * math.isinf(self.max_norm) + ["value"] * self.reads_grad
        return self.label or "-".join([self.name, *marks])

    @property
    def last_norm(self) -> float:
        """The norm of all true gradients before clipping, at the latest step; nan before the first."""
        return math.nan if self._global is None else float(self._global.value)

    @property
    def last_norms(self) -> tuple[float, ...]:
        """With `per_optimizer` the norm of each optimizer's gradients before clipping, else `last_norm` alone."""
        return tuple(float(norm.value) for norm in self._norms)

    def before_optimizer_step(self, ctx: TrainContext, *, will_skip: bool) -> bool:
        """Measure, ask for the division, and veto on the device where the norm cannot be used."""
        window = ctx.window
        if window is None:
            raise RuntimeError(
                "GradientClipHook.before_optimizer_step needs the update window of an orchestrator, but ctx.window is "
                "None; compose the hook in a TrainingUpdateOrchestrator and call that at every stage of the batch."
            )
        places: list[int | None] = [*range(len(ctx.optimizers))] if self.per_optimizer else [None]
        norms: dict[int | None, torch.Tensor] = {}
        self._norms = []
        for place in places:
            norms[place] = norm = window.norm(self.norm_type, optimizer=place)
            self._norms.append(ctx.read_later(norm))
        self._global = ctx.read_later(window.norm(self.norm_type)) if self.per_optimizer else self._norms[0]
        for norm in norms.values():
            limit = kernels.largest_usable(norm.dtype, self.max_norm, self.norm_type)
            ctx.defer_veto_above(norm, limit, self._reason, found_inf=True)
            if self.error_if_nonfinite and not ctx.read_later(norm).value <= limit:
                raise NonFiniteGradientError(refusal(ctx, self.last_norm, self.norm_type))
        if math.isfinite(self.max_norm):
            for place, norm in norms.items():
                at_most = kernels.largest_divisor(norm.dtype, self.max_norm, self.norm_type)
                window.divide(kernels.clip_divisor(norm, self.max_norm), optimizer=place, at_most=at_most)
        if self.clip_value is not None and self.reads_grad and not will_skip:
            self._cut(ctx, self.clip_value)
        return True

    def _cut(self, ctx: TrainContext, limit: float) -> None:
        """Cut every element, after the division, unless the step is vetoed."""
        window = ctx.window
        assert window is not None
        self._largest = ctx.read_later(window.norm(math.inf))
        _ = ctx.grad_norm  # measured now, it stays what it is before the cut
        window.materialise()
        veto = ctx.veto_flag
        kernels.clamp_(window.tensors(), limit, unless=torch.tensor(False) if veto is None else veto.bool())

    def capture_key(self, ctx: TrainContext) -> Hashable | None:
        """Return the thresholds, which are numbers in a captured update.

        Raises
        ------
        RuntimeError
            With `error_if_nonfinite`, which the host has to decide in every step.
        """
        if self.error_if_nonfinite:
            raise RuntimeError(
                "GradientClipHook: error_if_nonfinite is True, so the host reads the norm before every step, and no "
                "update can be captured; leave it out, a norm that is not finite vetoes the step then."
            )
        return self.max_norm, self.norm_type, self.clip_value, self.per_optimizer, self.reads_grad

    def captured(self, ctx: TrainContext) -> tuple[Any, list[Any], Any]:
        """Return the readings, which are read anew after every replay."""
        return self._global, self._norms, self._largest

    def replayed(self, ctx: TrainContext, left: tuple[Any, list[Any], Any]) -> None:
        """Go on from the readings of this graph; `settled` counts."""
        self._global, self._norms, self._largest = left

    def settled(self, ctx: TrainContext, *, skipped: bool) -> None:
        """Count."""
        self.measured_steps += 1
        clipped = False
        for norm in self._norms:
            clipped |= norm.value > self.max_norm
        if self.clip_value is not None and self._largest is not None:
            clipped |= self._largest.value > self.clip_value
        self.clipped_steps += clipped and not skipped

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
                f"GradientClipHook: the state is {dict(state)!r}; give {' and '.join(_COUNTERS)}, each an int from 0 on"
            )
        self.clipped_steps, self.measured_steps = (state[name] for name in _COUNTERS)

    def __repr__(self) -> str:
        fields = ("max_norm", "norm_type", "clip_value", "per_optimizer", "error_if_nonfinite")
        return f"{type(self).__name__}({', '.join(f'{field}={getattr(self, field)!r}' for field in fields)})"
