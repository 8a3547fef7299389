"""What outlives a run: checkpoints to go on from, and the final weights in a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from evaluate import averaged_model
from rich.console import Console

from nvalchemi.training import TrainingStrategy, bare_module, load_training


def saving(folder: Path, *, resume: bool) -> Any:
    """Make the hook that saves every epoch and the end.

    Raises
    ------
    FileExistsError
        There are checkpoints in `folder`, and the run is not to go on from them.
    ImportError
        The hook is not installed; the message says how to install it.
    """
    from nvalchemi.training import CheckpointHook  # only whoever saves needs it
    from nvalchemi_hooks_checkpoint import latest_checkpoint

    if not resume and (found := latest_checkpoint(folder)) is not None:
        raise FileExistsError(
            f"{folder} holds the checkpoints of an earlier run, the latest is {found.name}; "
            "add --resume to go on with it, or give --checkpoint another folder"
        )
    return CheckpointHook(root=folder, every_epochs=1)


def go_on(strategy: TrainingStrategy, folder: Path, console: Console) -> None:
    """Load the latest checkpoint; where there is none yet, say so and begin."""
    from nvalchemi_hooks_checkpoint import latest_checkpoint

    latest = latest_checkpoint(folder)
    if latest is None:
        console.print(f"no checkpoint in {folder} yet: the run starts from the beginning", highlight=False)
        return
    load_training(latest, strategy)
    console.print(f"going on from {latest}, after {strategy.step_count} steps", soft_wrap=True, highlight=False)


def export(file: Path, strategy: TrainingStrategy) -> None:
    """Write the weights, live and averaged, for ``torch.load(file, weights_only=True)``; equal weights, equal bytes."""
    weights = {"live": bare_module(strategy.models["main"]).state_dict()}
    if (averaged := averaged_model(strategy)) is not None:
        weights["averaged"] = averaged.module.state_dict()
    aside = file.with_name(f"{file.name}.part")
    with aside.open("wb") as opened:  # given a path, torch.save would write the file's name into the file
        torch.save({name: {key: one.cpu() for key, one in state.items()} for name, state in weights.items()}, opened)
    os.replace(aside, file)
