"""Vetoes and found-inf of all ranks, or-ed before the step: every rank steps, or none does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, distributed

from nvalchemi.training.hooks.decision import Veto, fold_flags
from nvalchemi.training.hooks.window import UpdateWindow

__all__ = ["Ranks"]

_AVAILABLE = distributed.is_available()


class Ranks:
    """What the ranks agree on in one window, in one collective that every one of them enters.

    Ranks that know their vetoes and ranks that leave them on the device can meet in it.

    Parameters
    ----------
    window : UpdateWindow
        That of this rank.
    """

    def __init__(self, window: UpdateWindow) -> None:
        self._window = window
        self.several = _AVAILABLE and distributed.is_initialized() and distributed.get_world_size() > 1
        self.votes: tuple[Tensor, ...] = ()  # vetoed, found inf, and whether each optimizer's gradients hold inf

    def why_at_once(self) -> str:
        """Return why vetoes cannot stay on the device; empty if they can."""
        if self.several and self._window.device.type != "cpu" and distributed.get_backend() != "nccl":
            return "the ranks agree on the host"
        if self.several and self._window.scaler is not None:  # it may have vetoed finite gradients
            return "another rank may leave the loss scale as it is"
        return ""

    def agree(self) -> None:
        """Agree on what the host knows."""
        if not self.several:
            return
        window, gradients = self._window, self._window.gradients
        mine = [window.vetoed, window.decision.found_inf, *(bool(one.holds_inf) for one in gradients)]
        device = window.device if distributed.get_backend() == "nccl" else torch.device("cpu")
        votes = torch.tensor(mine, dtype=torch.float32, device=device)
        distributed.all_reduce(votes, op=distributed.ReduceOp.MAX)
        self.take(votes.tolist())

    def agree_on_device(
        self, common: Tensor | None, own: list[Tensor | None]
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Agree on flags that the host does not know; the same flags come back, or-ed over all ranks.

        Parameters
        ----------
        common, own
            See `UpdateWindow.fold`.
        """
        if not self.several:
            return common, own
        window = self._window
        zero = torch.zeros((), device=window.device)
        found = [one for one in window.decision.deferred if one.found_inf]
        mine = [zero if common is None else common, fold_flags(found, [], window.device) if found else zero]
        votes = torch.stack([*mine, *[zero] * len(window.gradients)])  # the last are those of a loss scale
        distributed.all_reduce(votes, op=distributed.ReduceOp.MAX)
        self.votes = votes.unbind()
        return self.votes[0], [self.votes[0]] * len(own)

    def take(self, votes: Sequence[float]) -> None:
        """Let the window know what the ranks have agreed on, if they are several."""
        if not self.several:
            return
        window = self._window
        vetoed, found_inf, *infs = (bool(vote) for vote in votes)
        if vetoed and not window.vetoed:
            window.decision.vetoes.append(Veto("another rank", "a hook vetoed there"))
        window.decision.found_inf = found_inf
        for own, inf in zip(window.gradients, infs, strict=True):
            own.holds_inf = inf
