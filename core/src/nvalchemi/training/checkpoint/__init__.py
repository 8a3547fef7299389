"""Checkpoints: ``{section: plain data}`` on disk, written so that an interrupted save harms nothing.

This package does not know the strategy: it meets it through ``state_dict()`` and ``load_state_dict(state)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvalchemi._lazy import door

if TYPE_CHECKING:
    from nvalchemi.training.checkpoint.models import LoadedModels as LoadedModels
    from nvalchemi.training.checkpoint.models import load_checkpoint as load_checkpoint
    from nvalchemi.training.checkpoint.models import save_checkpoint as save_checkpoint
    from nvalchemi.training.checkpoint.training import Snapshot as Snapshot
    from nvalchemi.training.checkpoint.training import load_training as load_training
    from nvalchemi.training.checkpoint.training import save_training as save_training
    from nvalchemi.training.checkpoint.training import take_snapshot as take_snapshot

__getattr__, __dir__ = door(
    __name__,
    {
        "LoadedModels": "nvalchemi.training.checkpoint.models",
        "Snapshot": "nvalchemi.training.checkpoint.training",
        "load_checkpoint": "nvalchemi.training.checkpoint.models",
        "load_training": "nvalchemi.training.checkpoint.training",
        "save_checkpoint": "nvalchemi.training.checkpoint.models",
        "save_training": "nvalchemi.training.checkpoint.training",
        "take_snapshot": "nvalchemi.training.checkpoint.training",
    },
)
