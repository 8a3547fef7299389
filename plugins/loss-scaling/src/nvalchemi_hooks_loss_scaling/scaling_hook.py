"""Loss scaling as an update hook: scale before the backward pass, leave the rest to the update."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from nvalchemi.training.hooks import TrainingUpdateHook, UpdatePriority
from nvalchemi_hooks_loss_scaling.checks import publish, refuse_foreign_scaler, refuse_half_parameters
from nvalchemi_hooks_loss_scaling.scaler import LossScaler
from nvalchemi_hooks_loss_scaling.settings import ScalingSettings

if TYPE_CHECKING:
    from torch import Tensor

    from nvalchemi.hooks import TrainContext

__all__ = ["LossScalingHook"]

_DEFAULTS = ScalingSettings()


class LossScalingHook(TrainingUpdateHook):
    r"""Scale the loss so that small gradients survive fp16.

    :math:`\nabla L = \frac{1}{s} \nabla (s L)`. The loss is multiplied by the scale :math:`s` at DO_BACKWARD; the
    gradients are divided by it once, together with whatever else is divided (clipping), at the latest inside the
    optimizer. The hook itself never vetoes: without a veto hook every optimizer with inf or nan in its gradients skips
    for itself, and its scheduler with it. The scale backs off once for such a window.

    Casting is not its work: use it when your own code runs parts of the model in fp16, and
    `MixedPrecisionHook` when autocast should.

    Parameters
    ----------
    scale : float or "dynamic"
        A number is a static scale, and the other settings have no effect.
    init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale
        How a dynamic scale starts, moves and stops: see `nvalchemi_hooks_loss_scaling.settings.ScalingSettings`. The
        rule is that of ``torch.amp.GradScaler``, with a floor and a ceiling.

    Attributes
    ----------
    scaler : LossScaler
        Also in ``ctx.grad_scaler``, from BEFORE_BATCH on.

    Raises
    ------
    ValueError
        At construction: a setting out of its range. At SETUP: a trained parameter in fp16, named with its model, or
        another scaler in ``ctx.grad_scaler``.

    References
    ----------
    P. Micikevicius et al., "Mixed Precision Training", ICLR 2018, https://arxiv.org/abs/1710.03740.

    Examples
    --------
    >>> import torch
    >>> from nvalchemi.hooks import TrainContext
    >>> from nvalchemi.training import TrainingStage
    >>> from nvalchemi.training.hooks import TrainingUpdateOrchestrator
    >>> hook = LossScalingHook(init_scale=1024.0)
    >>> update = TrainingUpdateOrchestrator(hook)
    >>> weight = torch.nn.Parameter(torch.tensor(1.0))
    >>> with TrainContext(optimizers=[torch.optim.SGD([weight], lr=0.25)]) as ctx:
    ...     update(ctx, TrainingStage.BEFORE_BATCH)
    ...     ctx.loss = weight * 2.0
    ...     update(ctx, TrainingStage.DO_BACKWARD)
    ...     print(weight.grad)  # carries the scale
    ...     update(ctx, TrainingStage.DO_OPTIMIZER_STEP)
    ...     update(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
    tensor(2048.)
    >>> weight.item(), hook.scaler.get_scale()
    (0.5, 1024.0)
    """

    name: ClassVar[str] = "loss_scaling"
    priority: ClassVar[int] = UpdatePriority.SCALE
    exclusive_family: ClassVar[str | None] = "loss_scaling"
    reads_grad = False

    def __init__(
        self,
        *,
        scale: float | Literal["dynamic"] = "dynamic",
        init_scale: float = _DEFAULTS.init_scale,
        growth_factor: float = _DEFAULTS.growth_factor,
        backoff_factor: float = _DEFAULTS.backoff_factor,
        growth_interval: int = _DEFAULTS.growth_interval,
        min_scale: float = _DEFAULTS.min_scale,
        max_scale: float = _DEFAULTS.max_scale,
    ) -> None:
        self.scaler = LossScaler(
            scale=scale,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            min_scale=min_scale,
            max_scale=max_scale,
        )

    def setup(self, ctx: TrainContext) -> None:
        """Refuse what cannot be trained with a scaled loss."""
        refuse_foreign_scaler(ctx, self.scaler, self)
        refuse_half_parameters(ctx.models, self)

    def before_batch(self, ctx: TrainContext, *, will_skip: bool) -> bool:
        """Publish the scaler; gradients may be zeroed."""
        publish(ctx, self.scaler, self)
        return True

    def transform_loss(self, ctx: TrainContext, loss: Tensor) -> Tensor:
        """Return the scaled loss; a loop that skips BEFORE_BATCH has the scaler published here."""
        publish(ctx, self.scaler, self)
        return self.scaler.scale(loss)

    def capture_key(self, ctx: TrainContext) -> Hashable | None:
        """Return where scale and growth tracker lie; nowhere, as long as the host keeps count."""
        return self.scaler.place

    def captured(self, ctx: TrainContext) -> None:
        """Nothing is left that a replay would need."""

    def replayed(self, ctx: TrainContext, left: None) -> None:
        """Publish the scaler, as in a batch that is not replayed."""
        publish(ctx, self.scaler, self)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scaler: plain numbers."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; see `LossScaler.load_state_dict`."""
        self.scaler.load_state_dict(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.scaler.settings!r})"
