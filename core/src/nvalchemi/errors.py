"""What can go wrong, each refining a builtin, and the note that says where."""

from __future__ import annotations

from typing import Any

__all__ = [
    "CheckpointDamagedError",
    "CheckpointError",
    "CheckpointFormatError",
    "CheckpointMismatchError",
    "CheckpointMissingError",
    "CheckpointReadError",
    "CheckpointWarning",
    "CheckpointWriteError",
    "HookConflictError",
    "HookContractError",
    "HookNameClashError",
    "HookNotInstalledError",
    "HookRegistrationError",
    "HookStateMissingError",
    "HookSwitchedOffError",
    "ModelImportError",
    "ModelNotAllowedError",
    "ModelSpecError",
    "NoProgressError",
    "NonFiniteGradientError",
    "NotPlainDataError",
    "PluginLoadError",
    "PluginVersionError",
    "PluginWarning",
    "RanksDifferError",
    "UnknownHookError",
    "UnsupportedOptimizerError",
    "add_hook_note",
]


class HookRegistrationError(ValueError):
    """A hook was refused when it was registered; nothing has changed."""


class HookConflictError(ValueError):
    """Hooks that cannot be composed with each other."""


class HookContractError(TypeError):
    """A hook did what its protocol rules out."""


class RanksDifferError(RuntimeError):
    """Ranks that train together are not at the same place."""


class UnsupportedOptimizerError(TypeError):
    """An optimizer that the update cannot drive."""


class NonFiniteGradientError(FloatingPointError):
    """Gradients with inf or nan, where the run was told not to go on with them."""


class NoProgressError(RuntimeError):
    """A run in which nothing is trained any more."""


class UnknownHookError(LookupError):
    """No installed distribution offers a hook of that name."""


class HookNameClashError(LookupError):
    """Several distributions offer a hook of that name, and none was chosen."""


class HookSwitchedOffError(LookupError):
    """A hook that was named is switched off by the environment."""


class HookNotInstalledError(ImportError):
    """An official hook class whose distribution is not installed."""


class PluginLoadError(ImportError):
    """An installed plugin that cannot be loaded, or offers something wrong; its own error is the cause."""


class PluginVersionError(PluginLoadError):
    """An installed plugin that was made for another version of the core; its code was not imported."""


class PluginWarning(UserWarning):
    """Something about the installed plugins is wrong, and the work goes on without it."""


class CheckpointError(Exception):
    """Something is wrong with a checkpoint; the classes below say what."""


class CheckpointMissingError(CheckpointError, FileNotFoundError):
    """There is no checkpoint, or a file of it is missing."""


class CheckpointReadError(CheckpointError, OSError):
    """A checkpoint that is there and that the system does not let us read; its own error is the cause."""


class CheckpointFormatError(CheckpointError, ValueError):
    """A checkpoint of another format, or of another kind than was asked for."""


class CheckpointDamagedError(CheckpointError, ValueError):
    """A file that is not what was saved: truncated, or changed."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint that is whole and does not fit what it is loaded into; nothing was changed."""


class HookStateMissingError(CheckpointMismatchError):
    """A hook that keeps state, of which the checkpoint has none; nothing was changed."""


class CheckpointWriteError(CheckpointError, OSError):
    """A checkpoint that could not be written; an earlier one in the same place is as it was."""


class NotPlainDataError(CheckpointError, TypeError):
    """State that could be saved but not loaded safely."""


class ModelSpecError(CheckpointError, ValueError):
    """A description by which a model cannot be built."""


class ModelNotAllowedError(ModelSpecError):
    """A checkpoint that wants to build a class that the caller did not allow; none of its code was imported."""


class ModelImportError(CheckpointError, ImportError):
    """A checkpoint whose model can no longer be imported."""


class CheckpointWarning(UserWarning):
    """Something in a checkpoint has no place here; it is kept, and the work goes on."""


def add_hook_note(error: BaseException, hook: object, stage: Any, ctx: Any) -> None:
    """Note on an exception which hook raised it, from which distribution, at which stage and step.

    Parameters
    ----------
    error : BaseException
        The exception under way; it is changed in place, never replaced.
    hook : object
        The hook that was called. What an inner call noted already is left as it is.
    stage : Enum
        The stage at which it was called.
    ctx : HookContext
        The context it was called with.
    """
    from nvalchemi.metadata import provenance_of  # only asked when something failed: it reads the installed metadata

    if any(note.startswith("In hook ") for note in getattr(error, "__notes__", ())):
        return
    origin = provenance_of(hook)
    source = f"{origin.distribution} {origin.version}" if origin else "no installed distribution"
    counts = getattr(ctx, "possible_step_counts", None) or (getattr(ctx, "step_count", "?"),)  # nothing is resolved now
    error.add_note(
        f"In hook {type(hook).__name__} ({source}), stage {getattr(stage, 'name', stage)}, "
        f"step {' or '.join(map(str, counts))}."
    )
