"""TritonHook: brings an executor along, and otherwise stays out of the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from nvalchemi.training.hooks import TrainingUpdateHook
from nvalchemi_hooks_triton import kernels
from nvalchemi_hooks_triton.executor import OnePassExecutor

if TYPE_CHECKING:
    from nvalchemi.hooks import TrainContext, UpdateExecutor

__all__ = ["TritonHook"]


class TritonHook(TrainingUpdateHook):
    """Carry out the step of fused Adam and AdamW in one pass over memory: division, veto and moving average included.

    It changes how a step is done, not what it does: other hooks say what is to be divided out, vetoed and averaged. A
    step that the programs do not know is left to the core.

    Raises
    ------
    ImportError
        At SETUP: triton is missing or broken. The message says what to install.

    Examples
    --------
    >>> hook = TritonHook()
    >>> hook.name, hook.reads_grad
    ('triton', False)
    """

    name: ClassVar[str] = "triton"
    reads_grad = False
    defers_veto = True
    decides_alike = True

    def __init__(self) -> None:
        self._executor = OnePassExecutor()

    def setup(self, ctx: TrainContext) -> None:
        """Import triton now, so that a run that cannot have it ends before it begins."""
        kernels.programs()

    def update_executor(self) -> UpdateExecutor:
        """Return who carries out steps; see `nvalchemi.hooks.ProvidesExecutor`."""
        return self._executor

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
