"""Numbers that hooks add up over all ranks, in the one message that the ranks exchange at a step."""

from __future__ import annotations

import torch
from torch import Tensor

from nvalchemi.errors import HookContractError

__all__ = ["Shared", "too_late"]


class Shared:
    """A number of this rank, and what it comes to over all of them; see `TrainContext.share`.

    Examples
    --------
    >>> from nvalchemi.hooks import TrainContext
    >>> from nvalchemi.training import TrainingStage
    >>> from nvalchemi.training.hooks import TrainingUpdateOrchestrator
    >>> update, weight = TrainingUpdateOrchestrator(), torch.nn.Parameter(torch.ones(1))
    >>> with TrainContext(optimizers=[torch.optim.SGD([weight])]) as ctx:
    ...     update(ctx, TrainingStage.BEFORE_BATCH)
    ...     atoms = ctx.share(12)
    ...     ctx.loss = weight.sum()
    ...     update(ctx, TrainingStage.DO_BACKWARD)
    ...     update(ctx, TrainingStage.DO_OPTIMIZER_STEP)
    >>> float(atoms.total), float(atoms.mean)
    (12.0, 12.0)
    """

    def __init__(self, value: float | Tensor) -> None:
        self.value = _checked(value)
        self._total: float | Tensor | None = None
        self._ranks = 1

    @property
    def total(self) -> Tensor:
        """The sum over all ranks: 0-dim, where the number is that was given, and of its dtype (float64 of a float).

        Raises
        ------
        HookContractError
            A ``TypeError``: the ranks have not exchanged it yet.
        """
        if self._total is None:
            raise HookContractError(
                "A number that was shared was read before the ranks have exchanged it; read it in "
                "before_optimizer_step or later."
            )
        if not isinstance(self._total, Tensor):
            self._total = torch.tensor(self._total, dtype=torch.float64)
        return self._total

    @property
    def mean(self) -> Tensor:
        """The mean over all ranks, as `total`."""
        return self.total if self._ranks == 1 else self.total / self._ranks

    def settle(self, total: Tensor | None = None, ranks: int = 1) -> None:
        """Take the sum over so many ranks; None: there is this one only."""
        self._ranks = ranks
        if total is None:
            self._total = self.value
        else:
            given = self.value
            self._total = total.to(given.device, given.dtype) if isinstance(given, Tensor) else total


def too_late() -> HookContractError:
    """Return what is said to whoever shares a number once hooks decide."""
    return HookContractError(
        "A number was shared after the ranks have exchanged theirs for this step; share it earlier, in transform_loss "
        "or at AFTER_BACKWARD for example."
    )


def _checked(value: object) -> float | Tensor:
    if isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex():
        value = value.detach()
        return value.clone() if value.is_floating_point() else value.to(torch.float64)
    if isinstance(value, int | float):
        return float(value)
    got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise HookContractError(f"ctx.share got {got}; give a number, or a 0-dim real tensor.")
