"""Training in fp32, bf16 or fp16: autocast for forward and loss, and a scaled loss where fp16 needs it."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack, get_args

import torch
from torch import Tensor

from nvalchemi.training.hooks import TrainingUpdateHook, UpdatePriority
from nvalchemi_hooks_loss_scaling.checks import (
    publish,
    refuse_contradicting_parameters,
    refuse_foreign_scaler,
    refuse_half_parameters,
)
from nvalchemi_hooks_loss_scaling.scaler import LossScaler
from nvalchemi_hooks_loss_scaling.settings import ScalingOptions

if TYPE_CHECKING:
    from nvalchemi.hooks import TrainContext

__all__ = ["MixedPrecisionHook", "Precision"]

Precision = Literal["fp32", "bf16", "fp16"]

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_ALIASES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "single": "fp32"}


class MixedPrecisionHook(TrainingUpdateHook):
    """Train in a precision, named in one word.

    ========= ======================== =====================================================
    precision autocast                 scaled loss
    ========= ======================== =====================================================
    ``fp32``  no                       no: the hook does nothing at all
    ``bf16``  forward and loss         no: bf16 has the range of fp32
    ``fp16``  forward and loss         yes, dynamic unless asked otherwise, as `LossScalingHook`
    ========= ======================== =====================================================

    Parameters stay in fp32; autocast casts them for each batch anew. It is opened at BEFORE_BATCH and closed when the
    loss is handed to the backward pass, or when the batch ends, whatever raises. Validation runs in
    `inference_context`. Models that differentiate in their forward (forces by autograd) do so under autocast too.

    Parameters
    ----------
    precision : {"fp32", "bf16", "fp16"}
        In which the forward and the loss run.
    **scaling
        Only with ``fp16``: the settings of `LossScalingHook`.

    Attributes
    ----------
    scaler : LossScaler or None
        Also in ``ctx.grad_scaler``, from BEFORE_BATCH on; None without ``fp16``.

    Raises
    ------
    ValueError
        At construction: an unknown precision (the closest is named), scaling options without ``fp16``, or one out of
        its range. At SETUP, naming the first such parameter and its model: parameters in fp16 or bf16 with ``fp16``,
        in fp16 with ``bf16``, or nothing but float64, which autocast never touches; another scaler in
        ``ctx.grad_scaler``.

    References
    ----------
    P. Micikevicius et al., "Mixed Precision Training", ICLR 2018, https://arxiv.org/abs/1710.03740.

    Examples
    --------
    >>> hook = MixedPrecisionHook("bf16")
    >>> with hook.inference_context(torch.device("cpu")):
    ...     torch.nn.Linear(2, 1)(torch.ones(1, 2)).dtype
    torch.bfloat16
    >>> hook.scaler is None, MixedPrecisionHook("fp16", init_scale=1024.0).scaler.get_scale()
    (True, 1024.0)
    """

    name: ClassVar[str] = "mixed_precision"
    priority: ClassVar[int] = UpdatePriority.SCALE
    exclusive_family: ClassVar[str | None] = "loss_scaling"
    reads_grad = False

    def __init__(self, precision: Precision, **scaling: Unpack[ScalingOptions]) -> None:
        self.precision = _checked(precision, scaling)
        self.scaler = LossScaler(**scaling) if precision == "fp16" else None
        self._autocast: Any = None  # what ctx.enter_batch_context returned for the batch at hand

    def inference_context(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a fresh context in which a forward runs in this precision, for validation and inference."""
        dtype = _AUTOCAST.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast(torch.device(device).type, dtype=dtype)

    def setup(self, ctx: TrainContext) -> None:
        """Refuse parameters and scalers that contradict the precision."""
        if self.precision == "fp32":
            return
        refuse_foreign_scaler(ctx, self.scaler, self)
        if self.scaler is not None:
            refuse_half_parameters(ctx.models, self)
        refuse_contradicting_parameters(ctx.models, _AUTOCAST[self.precision], self)

    def before_batch(self, ctx: TrainContext, *, will_skip: bool) -> bool:
        """Open autocast for this batch and publish the scaler; gradients may be zeroed."""
        if self.precision == "fp32":
            return True
        self._leave_autocast()  # of a batch whose loop never closed its context
        if self.scaler is None:
            refuse_foreign_scaler(ctx, None, self)
        else:
            publish(ctx, self.scaler, self)
        self._autocast = ctx.enter_batch_context(self.inference_context(_device(ctx)))
        return True

    def transform_loss(self, ctx: TrainContext, loss: Tensor) -> Tensor:
        """Close autocast and return the loss, scaled if the precision is fp16."""
        self._leave_autocast()
        if self.scaler is None:
            return loss
        publish(ctx, self.scaler, self)
        return self.scaler.scale(loss)

    def capture_key(self, ctx: TrainContext) -> Hashable | None:
        """Return the precision, and where scale and growth tracker lie; None as long as the host keeps count."""
        place = () if self.scaler is None else self.scaler.place
        return None if place is None else (self.precision, place)

    def captured(self, ctx: TrainContext) -> None:
        """Nothing is left that a replay would need."""

    def replayed(self, ctx: TrainContext, left: None) -> None:
        """Publish the scaler, as in a batch that is not replayed."""
        if self.scaler is not None:
            publish(ctx, self.scaler, self)

    def state_dict(self) -> dict[str, Any]:
        """Return the precision and, for fp16, the state of the scaler."""
        state: dict[str, Any] = {"precision": self.precision}
        return state if self.scaler is None else {**state, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state.

        A state of another precision, or an empty one, gives a warning; fp16 then starts from a fresh scale.

        Parameters
        ----------
        state : mapping
            What `state_dict` returned.

        Raises
        ------
        ValueError
            It is the state of something else, or as for `LossScaler.load_state_dict`; nothing is changed then.
        """
        if state and "precision" not in state:
            raise ValueError(
                f"MixedPrecisionHook: the saved state holds {sorted(state)} and no precision: another hook saved it; "
                "load it there."
            )
        saved = state.get("precision", self.precision)
        if saved != self.precision:
            fresh = "" if self.scaler is None else f", from a fresh scale of {self.scaler.settings.first_scale!r}"
            warnings.warn(
                f"The saved state is that of a run in {saved}; this run goes on in {self.precision}{fresh}.",
                stacklevel=2,
            )
            if self.scaler is not None:
                self.scaler.reset()
        elif self.scaler is not None:
            self.scaler.load_state_dict(state.get("scaler", {}))

    def close(self) -> None:
        """Leave autocast if a batch has left it open; twice is harmless."""
        self._leave_autocast()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_autocast": None}  # it belongs to a batch of this process

    def __repr__(self) -> str:
        scaling = "" if self.scaler is None else f", {self.scaler.settings!r}"
        return f"{type(self).__name__}({self.precision!r}{scaling})"

    def _leave_autocast(self) -> None:
        opened, self._autocast = self._autocast, None
        if opened is not None:
            opened.close()


def _checked(precision: Precision, scaling: ScalingOptions) -> Precision:
    """Return the precision, or say what is wrong with it and the options beside it."""
    known = get_args(Precision)
    if precision not in known:
        closest = difflib.get_close_matches(str(precision).removeprefix("torch.").lower(), [*known, *_ALIASES], n=1)
        hint = f" Did you mean {_ALIASES.get(closest[0], closest[0])!r}?" if closest else ""
        raise ValueError(
            f"MixedPrecisionHook: precision is {precision!r}; give one of {', '.join(map(repr, known))}.{hint}"
        )
    for option in scaling:
        if option not in ScalingOptions.__annotations__:
            known_options = sorted(ScalingOptions.__annotations__)
            closest = difflib.get_close_matches(option, known_options, n=1)
            hint = f" Did you mean {closest[0]!r}?" if closest else ""
            raise TypeError(f"MixedPrecisionHook has no option {option!r}; there are {', '.join(known_options)}.{hint}")
    if scaling and precision != "fp16":
        raise ValueError(
            f"MixedPrecisionHook: {next(iter(scaling))} is given, but precision {precision!r} does not scale the loss; "
            "leave it out, or train in 'fp16'."
        )
    return precision


def _device(ctx: TrainContext) -> torch.device:
    if ctx.device is not None:
        return ctx.device
    parameters = (parameter for model in ctx.models.values() for parameter in model.parameters())
    return next((parameter.device for parameter in parameters), torch.device("cpu"))
