"""What the ranks agree on at a step: one message before hooks decide, and votes only where they could differ."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from nvalchemi.errors import RanksDifferError
from nvalchemi.training.arguments import gathered
from nvalchemi.training.hooks.decision import Veto, fold_flags
from nvalchemi.training.sharding import is_sharded

if TYPE_CHECKING:
    from nvalchemi.hooks.context import TrainContext
    from nvalchemi.training.hooks.parts import Voter
    from nvalchemi.training.hooks.window import UpdateWindow

__all__ = ["Ranks", "RanksOfWindow"]

_AVAILABLE = distributed.is_available()
_HEADER = 3  # place, its square, and who is at the last batch
_ROOM = 32  # numbers are sent in multiples of it, so that ranks that share more or fewer still meet


class Ranks:
    """The other ranks, as a composition of hooks knows them from step to step.

    Parameters
    ----------
    voting : sequence of Voter
        The hooks that take part in the step.
    """

    def __init__(self, voting: Sequence[Voter]) -> None:
        self._voting = voting
        self._looked_at: tuple[list[nn.Module], list[Any]] = ([], [])
        self._reduces = False

    def exchange(self, ctx: TrainContext, window: UpdateWindow) -> RanksOfWindow | None:
        """Send what hooks share, and learn what it comes to; None where this is the only rank, and nothing is sent."""
        if not (_AVAILABLE and distributed.is_initialized() and distributed.get_world_size() > 1):
            for one in window.shared:
                one.settle()
            return None
        alike = all(v.hook.decides_alike or not (v.decides and v.hook.may_veto) for v in self._voting)
        ranks = RanksOfWindow(window, alike=alike and self._reduce(ctx))
        ranks.exchange(ctx)
        return ranks

    def _reduce(self, ctx: TrainContext) -> bool:
        """Return whether gradients are reduced over ranks for certain, so that all of them see the same."""
        models, optimizers = list(ctx.models.values()), list(ctx.untouched_optimizers)
        if not (_same(models, self._looked_at[0]) and _same(optimizers, self._looked_at[1])):
            self._looked_at = models, optimizers
            replicas = [
                m for one in models for m in one.modules() if isinstance(m, nn.parallel.DistributedDataParallel)
            ]
            reduced = {id(parameter) for replica in replicas for parameter in replica.parameters()}
            trained = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
            self._reduces = all(id(parameter) in reduced or is_sharded(parameter) for parameter in trained)
        return self._reduces

    def __getstate__(self) -> dict[str, Any]:
        """Leave models and optimizers out, which are only remembered."""
        return {"_voting": self._voting, "_looked_at": ([], []), "_reduces": False}


class RanksOfWindow:
    """What the ranks agree on in one window.

    Parameters
    ----------
    window : UpdateWindow
        That of this rank.
    alike : bool
        All ranks come to the same decision by themselves, from what was exchanged.
    """

    def __init__(self, window: UpdateWindow, *, alike: bool) -> None:
        self._window, self.alike = window, alike
        self.votes: tuple[Tensor, ...] = ()  # vetoed, found inf, and whether each optimizer's gradients hold inf
        self._place: dict[str, int] = {}
        self._header: list[Any] = []
        self._world = distributed.get_world_size()
        self._on_device = distributed.get_backend() == "nccl"

    @property
    def _device(self) -> torch.device:
        return self._window.device if self._on_device else torch.device("cpu")

    def exchange(self, ctx: TrainContext) -> None:
        """Add up, over all ranks and in one message, what hooks share and what norms of spread gradients need."""
        window, device = self._window, self._device
        spread = [gradients for gradients in window.gradients if gradients.is_spread]
        self._place = {"batch": ctx.batch_count, "numbers": len(window.shared), "last": int(ctx.is_last_batch)}
        place = zlib.crc32(repr((ctx.batch_count, len(window.shared), len(spread))).encode()) & 0xFFFFF
        header = [float(place), float(place**2), float(ctx.is_last_batch)]
        values = [*(one.total_here(device) for one in spread), *(one.value for one in window.shared)]
        room = -(len(header) + len(values)) % _ROOM
        message = _packed([*header, *values, *[0.0] * room], device)
        distributed.all_reduce(message)
        numbers = message.unbind()
        totals = numbers[_HEADER:]
        for gradients, total in zip(spread, totals, strict=False):
            gradients.take_total(total.to(gradients.device))
        for one, total in zip(window.shared, totals[len(spread) :], strict=False):
            one.settle(total, self._world)
        if self._on_device:  # read with what else the host wants to know
            self._header = [window.decision.read_later(number) for number in numbers[:_HEADER]]
        else:
            self._check(message[:_HEADER].tolist(), together=True)

    def close(self) -> None:
        """Note that hooks have decided: from now on not every rank need ask what another does."""
        for gradients in self._window.gradients:
            gradients.asking = False

    def check(self, *, together: bool) -> None:
        """Refuse to go on with ranks that are elsewhere, now that the host knows.

        Parameters
        ----------
        together : bool
            Every rank does so at this very moment, so that they can tell each other where they are.
        """
        header, self._header = self._header, []
        if header:
            self._check([reading.value for reading in header], together=together)

    def why_at_once(self) -> str:
        """Return why vetoes cannot stay on the device; empty if they can."""
        if self.alike:
            return ""
        if self._window.device.type != "cpu" and not self._on_device:
            return "the ranks agree on the host"
        if self._window.scaler is not None:  # it may have vetoed finite gradients
            return "another rank may leave the loss scale as it is"
        return ""

    def agree(self) -> None:
        """Agree on votes that the host knows, if they could differ."""
        self.check(together=True)
        if self.alike:
            return
        window, gradients = self._window, self._window.gradients
        mine = [window.vetoed, window.decision.found_inf, *(bool(one.holds_inf) for one in gradients)]
        votes = torch.tensor(mine, dtype=torch.float32, device=self._device)
        distributed.all_reduce(votes, op=distributed.ReduceOp.MAX)
        self.take(votes.tolist())

    def agree_on_device(
        self, common: Tensor | None, own: list[Tensor | None]
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Agree on flags that the host does not know, if they could differ; the same come back, or-ed over all ranks.

        Parameters
        ----------
        common, own
            See `UpdateWindow.fold`.
        """
        if self.alike:
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
        """Let the window know what the ranks have agreed on, if they had to."""
        if self.alike:
            return
        window = self._window
        vetoed, found_inf, *infs = (bool(vote) for vote in votes)
        if vetoed and not window.vetoed:
            window.decision.vetoes.append(Veto("another rank", "a hook vetoed there"))
        window.decision.found_inf = found_inf
        for own, inf in zip(window.gradients, infs, strict=True):
            own.holds_inf = inf

    def _check(self, header: Sequence[float], *, together: bool) -> None:
        place, square, last = (int(number) for number in header)
        if place * place != self._world * square or last not in (0, self._world):
            raise RanksDifferError(_where(gathered(self._place) if together else [self._place]))


def _where(places: Sequence[dict[str, int]]) -> str:
    said = [
        f"rank {rank}: batch {place['batch']}{', the last of its pass' if place['last'] else ''}, "
        f"{place['numbers']} numbers shared"
        for rank, place in enumerate(places)
    ]
    known = "; ".join(said) if len(said) > 1 else f"this rank is at batch {places[0]['batch']}"
    return (
        f"The ranks have met at a step, but are not at the same place ({known}); give every rank as many batches, and "
        "have hooks share the same numbers on every rank."
    )


def _same(these: Sequence[object], those: Sequence[object]) -> bool:
    return len(these) == len(those) and all(one is other for one, other in zip(these, those, strict=True))


def _packed(numbers: Sequence[float | Tensor], device: torch.device) -> Tensor:
    """Return numbers as one float64 tensor."""
    if not any(isinstance(number, Tensor) for number in numbers):
        return torch.tensor(numbers, dtype=torch.float64, device=device)
    tensors = [
        number.to(device, torch.float64)
        if isinstance(number, Tensor)
        else torch.full((), number, dtype=torch.float64, device=device)
        for number in numbers
    ]
    return torch.stack(tensors)
