"""Hooks that take part in the weight update: their base class, their orchestrator, and the official ones.

Importing this module imports nothing else. An official hook class whose distribution is missing raises an ImportError
that says what to install; ``dir()`` and ``__all__`` hold only what is there.

>>> from nvalchemi.training.hooks import PassThrough
>>> int(PassThrough().priority)
50
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvalchemi._lazy import door

if TYPE_CHECKING:
    from nvalchemi.training.hooks.decision import Reading as Reading
    from nvalchemi.training.hooks.orchestrator import TrainingUpdateOrchestrator as TrainingUpdateOrchestrator
    from nvalchemi.training.hooks.plan import AverageOffer as AverageOffer
    from nvalchemi.training.hooks.plan import OptimizerPlan as OptimizerPlan
    from nvalchemi.training.hooks.shared import Shared as Shared
    from nvalchemi.training.hooks.stepping import StepOutcome as StepOutcome
    from nvalchemi.training.hooks.update import AlwaysVeto as AlwaysVeto
    from nvalchemi.training.hooks.update import PassThrough as PassThrough
    from nvalchemi.training.hooks.update import TrainingUpdateHook as TrainingUpdateHook
    from nvalchemi.training.hooks.update import UpdatePriority as UpdatePriority
    from nvalchemi_hooks_checkpoint import CheckpointHook as CheckpointHook
    from nvalchemi_hooks_distributed import DDPHook as DDPHook
    from nvalchemi_hooks_distributed import FSDPHook as FSDPHook
    from nvalchemi_hooks_ema import EMAHook as EMAHook
    from nvalchemi_hooks_grad_accum import GradientAccumulationHook as GradientAccumulationHook
    from nvalchemi_hooks_grad_clip import GradientClipHook as GradientClipHook
    from nvalchemi_hooks_loss_scaling import LossScalingHook as LossScalingHook
    from nvalchemi_hooks_loss_scaling import MixedPrecisionHook as MixedPrecisionHook
    from nvalchemi_hooks_scaler_veto import GradScalerVetoHook as GradScalerVetoHook
    from nvalchemi_hooks_triton import TritonHook as TritonHook

__getattr__, __dir__ = door(
    __name__,
    {
        "AlwaysVeto": "nvalchemi.training.hooks.update",
        "AverageOffer": "nvalchemi.training.hooks.plan",
        "OptimizerPlan": "nvalchemi.training.hooks.plan",
        "PassThrough": "nvalchemi.training.hooks.update",
        "Reading": "nvalchemi.training.hooks.decision",
        "Shared": "nvalchemi.training.hooks.shared",
        "StepOutcome": "nvalchemi.training.hooks.stepping",
        "TrainingUpdateHook": "nvalchemi.training.hooks.update",
        "TrainingUpdateOrchestrator": "nvalchemi.training.hooks.orchestrator",
        "UpdatePriority": "nvalchemi.training.hooks.update",
    },
    official_hooks=True,
)
