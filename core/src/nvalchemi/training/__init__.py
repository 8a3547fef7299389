"""Training with hooks: the strategy, its parts, and every official hook that is installed.

Importing this module imports nothing else. An official hook class whose distribution is missing raises an ImportError
that says what to install; ``dir()`` and ``__all__`` hold only what is there.

>>> from nvalchemi.training import TrainingStage
>>> TrainingStage.SETUP.name
'SETUP'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvalchemi._lazy import door

if TYPE_CHECKING:
    from nvalchemi.training.checkpoint.models import load_checkpoint as load_checkpoint
    from nvalchemi.training.checkpoint.models import save_checkpoint as save_checkpoint
    from nvalchemi.training.checkpoint.training import Snapshot as Snapshot
    from nvalchemi.training.checkpoint.training import load_training as load_training
    from nvalchemi.training.checkpoint.training import save_training as save_training
    from nvalchemi.training.checkpoint.training import take_snapshot as take_snapshot
    from nvalchemi.training.model_spec import ModelSpec as ModelSpec
    from nvalchemi.training.model_spec import create_model_spec as create_model_spec
    from nvalchemi.training.optimizers import OptimizerConfig as OptimizerConfig
    from nvalchemi.training.sharding import is_sharded as is_sharded
    from nvalchemi.training.sharding import like_sharded as like_sharded
    from nvalchemi.training.sharding import local_part as local_part
    from nvalchemi.training.stages import TrainingStage as TrainingStage
    from nvalchemi.training.strategy import TrainingStrategy as TrainingStrategy
    from nvalchemi.training.trace import HookTrace as HookTrace
    from nvalchemi.training.unwrap import bare_module as bare_module
    from nvalchemi.training.validation import Validation as Validation
    from nvalchemi.training.validation import ValidationResult as ValidationResult
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
        "HookTrace": "nvalchemi.training.trace",
        "ModelSpec": "nvalchemi.training.model_spec",
        "OptimizerConfig": "nvalchemi.training.optimizers",
        "Snapshot": "nvalchemi.training.checkpoint.training",
        "TrainingStage": "nvalchemi.training.stages",
        "TrainingStrategy": "nvalchemi.training.strategy",
        "Validation": "nvalchemi.training.validation",
        "ValidationResult": "nvalchemi.training.validation",
        "bare_module": "nvalchemi.training.unwrap",
        "create_model_spec": "nvalchemi.training.model_spec",
        "is_sharded": "nvalchemi.training.sharding",
        "like_sharded": "nvalchemi.training.sharding",
        "load_checkpoint": "nvalchemi.training.checkpoint.models",
        "load_training": "nvalchemi.training.checkpoint.training",
        "local_part": "nvalchemi.training.sharding",
        "save_checkpoint": "nvalchemi.training.checkpoint.models",
        "save_training": "nvalchemi.training.checkpoint.training",
        "take_snapshot": "nvalchemi.training.checkpoint.training",
    },
    official_hooks=True,
)
