"""The gradients of one optimizer in one window: what they truly are, and what is still to be divided out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from nvalchemi.training.hooks.members import Members
from nvalchemi.training.hooks.spread import from_total, over_ranks, share_of, total_of
from nvalchemi.training.sharding import local_part

__all__ = ["OptimizerGradients", "combine_norms"]

_dtype, _layout, _requires_grad = map(attrgetter, ("dtype", "layout", "requires_grad"))  # for loops that run in C
_DENSE = {torch.strided}
_IN_RANGE = (1e-15, math.inf)  # of a norm whose float32 sum of squares has neither overflowed nor lost its digits


def combine_norms(norms: Sequence[Tensor], kind: float, device: torch.device) -> Tensor:
    """Return the norm of parts whose norms are known: 0-dim, on `device`; 0.0 of no parts."""
    if not norms:
        return torch.zeros((), device=device)
    if len(norms) == 1:
        return norms[0].to(device)
    wide = torch.float32 if device.type == "mps" else torch.float64  # their squares have to fit
    combined: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device, wide) for norm in norms]), kind)
    return combined if any(norm.dtype == torch.float64 for norm in norms) else combined.to(torch.float32)


class OptimizerGradients:
    """One optimizer's gradients, with the divisors that are pending on them.

    ``.grad`` holds ``scale * divisor`` times what the optimizer is meant to see. Both factors wait until somebody needs
    the gradients themselves: `materialise` divides once, by their product; a fused optimizer takes the product along.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Every parameter of its groups that has a gradient takes part.
    members : Members
        Its parameters.
    """

    scale: Tensor | None = None  # what true gradients are divided by, while it is pending: loss scale, normaliser
    normaliser: Tensor | None = None  # the latter alone, pending or done
    divisor: Tensor | None = None  # what hooks have asked for, while it is pending
    clipped: Tensor | None = None  # the product of all that hooks have asked for, pending or done
    largest_divisor = 1.0  # what `clipped` can be at most
    holds_inf: bool | None = None  # whether the backward pass left inf or nan, agreed over all ranks
    found_here = False  # the same, of this rank alone
    left_undivided = False  # who stepped has read the gradients and left them as they were
    is_spread = False  # every rank holds a part of them
    asking = False  # every rank asks for the same norms now
    division = ""  # how pending divisors reached the optimizer, once it has stepped
    _peak: Tensor | None = None
    _divided: Tensor | None = None  # what was divided out of .grad since the norms were measured
    _product: Tensor | None = None  # of scale and divisor, once somebody has asked
    _seen: Sequence[tuple[Tensor, int]] = ()

    def __init__(self, optimizer: torch.optim.Optimizer, members: Members) -> None:
        self.optimizer = optimizer
        self._members = members
        self._norms: dict[float, Tensor] = {}
        self.collect()

    @property
    def double(self) -> bool:
        """Whether any of them is in double precision."""
        return self._members.double

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters of the optimizer."""
        return self._members.parameters

    def collect(self) -> None:
        """Look at ``.grad`` anew: somebody may have changed or replaced gradients."""
        self.with_grad, self.tensors = self._members.with_grad()  # the latter as dense real tensors that hold something
        if self._members.spread:
            self._collect_parts()
        elif not (self._members.plain and _are_usual(self.tensors)):
            self.tensors = [values for values in map(_values, self.with_grad) if values.numel() > 0]
        self.device = self.tensors[0].device if self.tensors else torch.device("cpu")
        self.are_there = bool(self.with_grad if self.is_spread else self.tensors)
        self.holds_any = self.are_there  # also once they are released
        self._norms.clear()
        self._divided = None

    def remember(self) -> None:
        """Note what gradients are now, so that `have_changed` can tell."""
        self._seen = [(p.grad, p.grad._version) for p in self.with_grad if p.grad is not None]

    def have_changed(self) -> bool:
        """Return whether somebody has replaced or changed a gradient since `remember`."""
        now = [p.grad for p in self.parameters if p.grad is not None]
        return len(now) != len(self._seen) or any(
            grad is not before or grad._version != version
            for grad, (before, version) in zip(now, self._seen, strict=True)
        )

    def release(self) -> None:
        """Let go of the gradients themselves."""
        self.tensors, self.with_grad, self._seen, self.are_there = [], [], [], False

    def peak(self) -> Tensor:
        """Return a norm that is finite just where all gradients were when the backward pass left them: 0-dim."""
        if self._peak is None:
            # A double sum of squares can overflow.
            self._peak = self._raw_norm(math.inf if self._members.double and not self.is_spread else 2.0)
        return self._peak

    def norm(self, kind: float) -> Tensor:
        """Return the norm of the gradients as the optimizer would see them now: 0-dim."""
        pending = self.pending()
        norm = self._raw_norm(kind) if pending is None else self._raw_norm(kind).div(pending)
        return norm if self._members.double or norm.dtype == torch.float32 else norm.to(torch.float32)

    @property
    def knows_norm(self) -> bool:
        """Whether the L2 norm has been measured."""
        return 2.0 in self._norms

    def norm_before_clipping(self) -> Tensor:
        """Return the L2 norm of the unscaled gradients, with whatever hooks divided out put back: 0-dim."""
        if self.clipped is not None and self.clipped is not self.divisor:
            return self.norm(2.0) * self.clipped
        norm = self._raw_norm(2.0) if self.scale is None else self._raw_norm(2.0) / self.scale
        return norm if self._members.double else norm.to(torch.float32)

    def divide(self, by: Tensor, at_most: float) -> None:
        """Put a divisor on the gradients, to be applied with the others."""
        self.largest_divisor *= at_most
        if self.clipped is self.divisor:
            self.clipped = self.divisor = by if self.divisor is None else self.divisor * by
        else:
            self.divisor = by if self.divisor is None else self.divisor * by
            self.clipped = by if self.clipped is None else self.clipped * by
        self._product = None

    def normalise(self, by: Tensor, at_most: float) -> None:
        """Have true gradients be those divided by `by`; unlike clipping, that shows in norms before clipping."""
        self.largest_divisor *= at_most
        self.normaliser = by if self.normaliser is None else self.normaliser * by
        self.scale = by if self.scale is None else self.scale * by
        self._product = None

    def pending(self) -> Tensor | None:
        """Return the product of everything still to be divided out, or None."""
        if self.scale is None:
            return self.divisor
        if self.divisor is None:
            return self.scale
        return self.pending_product() if self._product is None else self._product

    @property
    def has_product(self) -> bool:
        """Whether both loss scale and clipping factor are pending."""
        return self.scale is not None and self.divisor is not None

    def pending_product(self) -> Tensor:
        """Return loss scale times clipping factor, both of which are pending."""
        if self._product is None:
            assert self.scale is not None
            assert self.divisor is not None
            self._product = self.scale.mul(self.divisor)  # quicker than `*`, which is looked for in two places
        return self._product

    def materialise(self) -> None:
        """Divide everything pending out of ``.grad``, in one division.

        A divisor that is not finite belongs to a step that is vetoed: it counts as 1, so that an inf stays to be found.
        """
        if self.divisor is not None:
            finite = self.divisor.nan_to_num(nan=1.0, posinf=1.0)
            self.clipped = finite if self.clipped is self.divisor else self.clipped
            self.divisor, self._product = finite, None
        pending = self.pending()
        if pending is not None:
            for device, tensors in _by_device(self.tensors).items():
                torch._foreach_div_(tensors, pending.to(device))
            self._settled(pending)
            self.scale = self.divisor = self._product = None

    def settle_scale(self, loss_scale: Tensor) -> None:
        """Note that somebody else has divided the loss scale out of ``.grad``; a normaliser stays to be divided."""
        if self.scale is not None:
            self._settled(loss_scale)
            self.scale, self._product = self.normaliser, None

    def settle_division(self) -> None:
        """Note that the optimizer's own pass has divided everything pending out of ``.grad``."""
        pending = self.pending()
        if pending is not None:
            self._settled(pending)
            self.scale = self.divisor = self._product = None

    # Gradients that are spread over ranks.

    def total_here(self, device: torch.device) -> Tensor:
        """Return the sum of squares of what this rank holds, to be added up over ranks: 0-dim."""
        return total_of(self._norms_here(2.0), 2.0, device)

    def take_total(self, total: Tensor) -> None:
        """Take the sum of squares over all ranks; until hooks have decided they may ask for other norms too."""
        self._norms[2.0] = self._peak = from_total(total, 2.0)
        self.asking = True

    def _collect_parts(self) -> None:
        self.is_spread, parts = True, []
        self._shares: list[float] = []
        for parameter in self.with_grad:
            grad = parameter.grad
            assert grad is not None
            part = local_part(grad).detach()
            if part.numel() > 0:
                parts.append(torch.view_as_real(part) if part.is_complex() else part)
                self._shares.append(share_of(grad))
        self.tensors = parts

    def _norms_here(self, kind: float) -> list[tuple[float, Tensor]]:
        """Return the norms of what this rank holds, by what it counts among the ranks."""
        groups: dict[float, list[Tensor]] = {}
        for share, tensor in zip(self._shares, self.tensors, strict=True):
            groups.setdefault(share, []).append(tensor)
        return [(share, _norm_in(group, kind, None, exact=True)) for share, group in groups.items()]

    def _settled(self, pending: Tensor) -> None:
        if self._norms:
            self._divided = pending if self._divided is None else self._divided * pending

    def _raw_norm(self, kind: float) -> Tensor:
        """Return the norm of what lies in ``.grad``, pending factors included."""
        if kind not in self._norms:
            if self.is_spread:
                norm = over_ranks(self._norms_here(kind), kind, self.device, asking=self.asking)
            else:
                norm = _norm(self.tensors, kind, self._members.device)
            self._norms[kind] = norm if self._divided is None else norm * self._divided
        return self._norms[kind] if self._divided is None else self._norms[kind] / self._divided


def _norm(tensors: list[Tensor], kind: float, device: torch.device | None) -> Tensor:
    """Return the norm of tensors, which all lie on `device` if it is given."""
    norm = _norm_in(tensors, kind, device, exact=tensors[0].is_cuda)
    if norm.is_cpu and not _IN_RANGE[0] < _on_host(norm) < _IN_RANGE[1]:
        norm = _norm_in(tensors, kind, device, exact=True)
        peak = _on_host(_norm_in(tensors, math.inf, device, exact=True))
        if not math.isfinite(_on_host(norm)) and math.isfinite(peak):  # a float64 sum of squares has overflowed
            norm = peak * _norm_in([tensor / peak for tensor in tensors], kind, device, exact=True)
    return norm


def _on_host(norm: Tensor) -> float:
    value: Any = norm.tolist()  # memory of the host is read without waiting
    return float(value)


def _norm_in(tensors: list[Tensor], kind: float, device: torch.device | None, *, exact: bool) -> Tensor:
    """Return the norm, accumulated in float64 if `exact` (on a GPU the walk over memory hides it), else in float32."""
    if device is not None:
        parts = list(torch._foreach_norm(tensors, kind, dtype=_accumulate_in(tensors, exact)))
    else:
        parts = [
            part.to(tensors[0].device)
            for group in _by_device(tensors).values()
            for part in torch._foreach_norm(group, kind, dtype=_accumulate_in(group, exact))
        ]
        wide = any(part.dtype == torch.float64 for part in parts)
        parts = [part.to(torch.float64) for part in parts] if wide else parts
    return torch.linalg.vector_norm(torch.stack(parts), kind)  # type: ignore[no-any-return]


def _accumulate_in(tensors: list[Tensor], exact: bool) -> torch.dtype:
    if exact and tensors[0].device.type != "mps":
        return torch.float64
    return torch.float64 if torch.float64 in map(_dtype, tensors) else torch.float32


def _are_usual(grads: list[Tensor]) -> bool:
    """Return whether all are dense and may be read and written as they are."""
    return not (any(map(_requires_grad, grads)) or any(map(Tensor.is_neg, grads)) or set(map(_layout, grads)) - _DENSE)


def _values(parameter: Tensor) -> Tensor:
    """Return a gradient as a dense tensor of real numbers that shares its memory."""
    grad = parameter.grad
    assert grad is not None
    if grad.layout is torch.sparse_coo:
        parameter.grad = grad = grad.coalesce()
        grad = grad.values()
    if grad.is_conj() or grad.is_neg():
        parameter.grad = grad = grad.resolve_conj().resolve_neg()
    grad = grad.detach()
    return torch.view_as_real(grad) if grad.is_complex() else grad


def _by_device(tensors: list[Tensor]) -> dict[torch.device, list[Tensor]]:
    groups: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return groups
