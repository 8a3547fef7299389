"""The official hooks by name: the one place where the core knows them.

The table serves two things only: the re-export of the classes from the public doors, and the hint what to install when
one is named and not there. Nothing else in the core may depend on it.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["OFFICIAL_HOOKS", "OfficialHook", "by_class_name", "by_entry_point"]

_CORE_DISTRIBUTION = "nvalchemi-hooks"


class OfficialHook(NamedTuple):
    """Where one official hook class lives and how to get it.

    Attributes
    ----------
    class_name : str
        Name of the class, as the doors re-export it.
    entry_point : str
        Name under which discovery finds the hook.
    distribution : str
        The distribution that ships it.
    extra : str
        The extra of the core that installs that distribution.
    module : str
        The module from which the class is imported.
    """

    class_name: str
    entry_point: str
    distribution: str
    extra: str
    module: str

    @property
    def install_command(self) -> str:
        """The command that installs the hook, ready to paste into a shell.

        >>> by_class_name("EMAHook").install_command
        "pip install 'nvalchemi-hooks[ema]'"
        """
        return f"pip install '{_CORE_DISTRIBUTION}[{self.extra}]'"


def _hook(class_name: str, entry_point: str, extra: str) -> OfficialHook:
    module = f"nvalchemi_hooks_{extra.replace('-', '_')}"
    return OfficialHook(class_name, entry_point, f"{_CORE_DISTRIBUTION}-{extra}", extra, module)


OFFICIAL_HOOKS: tuple[OfficialHook, ...] = (
    _hook("CheckpointHook", "checkpoint", "checkpoint"),
    _hook("DDPHook", "ddp", "distributed"),
    _hook("EMAHook", "ema", "ema"),
    _hook("FSDPHook", "fsdp", "distributed"),
    _hook("GradScalerVetoHook", "scaler_veto", "scaler-veto"),
    _hook("GradientAccumulationHook", "grad_accum", "grad-accum"),
    _hook("GradientClipHook", "grad_clip", "grad-clip"),
    _hook("LossScalingHook", "loss_scaling", "loss-scaling"),
    _hook("MixedPrecisionHook", "mixed_precision", "loss-scaling"),
    _hook("TritonHook", "triton", "triton"),
)


def by_class_name(name: str) -> OfficialHook | None:
    """Return the official hook whose class is called `name`, or None.

    >>> by_class_name("GradientClipHook").distribution
    'nvalchemi-hooks-grad-clip'
    """
    return next((hook for hook in OFFICIAL_HOOKS if hook.class_name == name), None)


def by_entry_point(name: str) -> OfficialHook | None:
    """Return the official hook that discovery calls `name`, or None.

    >>> by_entry_point("mixed_precision").class_name
    'MixedPrecisionHook'
    """
    return next((hook for hook in OFFICIAL_HOOKS if hook.entry_point == name), None)
