"""What can go wrong, each refining a builtin, and the note that says where."""

from __future__ import annotations

from typing import Any

__all__ = [
    "HookConflictError",
    "HookContractError",
    "HookNameClashError",
    "HookNotInstalledError",
    "HookRegistrationError",
    "HookSwitchedOffError",
    "NoProgressError",
    "NonFiniteGradientError",
    "PluginLoadError",
    "PluginVersionError",
    "PluginWarning",
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
    error.add_note(
        f"In hook {type(hook).__name__} ({source}), stage {getattr(stage, 'name', stage)}, "
        f"step {getattr(ctx, 'step_count', '?')}."
    )
