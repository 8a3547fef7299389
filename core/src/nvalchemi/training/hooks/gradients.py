"""The gradients of one optimizer in one window: what they truly are, and what is still to be divided out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["OptimizerGradients", "combine_norms"]

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
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.scale: Tensor | None = None  # the loss scale, while it is pending
        self.divisor: Tensor | None = None  # what hooks have asked for, while it is pending
        self.clipped: Tensor | None = None  # the product of all that hooks have asked for, pending or done
        self.holds_inf: bool | None = None  # the host's copy of `flag`, once it was read, agreed over all ranks
        self.found_here = False  # the same, of this rank alone
        self.division = ""  # how pending divisors reached the optimizer, once it has stepped
        self._flag: Tensor | None = None
        self._norms: dict[float, Tensor] = {}
        self._divided: Tensor | None = None  # what was divided out of .grad since the norms were measured
        self._product: Tensor | None = None  # of scale and divisor, once somebody has asked
        self.tensors: list[Tensor] = []
        self.collect()

    def parameters(self) -> Iterator[Tensor]:
        """Iterate over all parameters of the optimizer."""
        return (parameter for group in self.optimizer.param_groups for parameter in group["params"])

    def collect(self) -> None:
        """Look at ``.grad`` anew: somebody may have changed or replaced gradients."""
        found = (_values(p) for p in self.parameters() if p.grad is not None)
        self.tensors = [tensor for tensor in found if tensor.numel() > 0]
        self._seen = [(p, p.grad, None if p.grad is None else p.grad._version) for p in self.parameters()]
        self._norms.clear()
        self._divided = None

    def have_changed(self) -> bool:
        """Return whether somebody has replaced or changed a gradient since they were looked at."""
        return any(p.grad is not grad or (grad is not None and grad._version != was) for p, grad, was in self._seen)

    def release(self) -> None:
        """Let go of the gradients themselves."""
        self.tensors, self._seen = [], []

    def flag(self) -> Tensor:
        """Return 1.0 if the backward pass left an inf or a nan, else 0.0: float32, 0-dim; the first answer stays."""
        if self._flag is None:
            kind = math.inf if _hold_double(self.tensors) else 2.0  # a double sum of squares can overflow
            norm = self._raw_norm(kind)
            self._flag = (norm - norm).ne(0).to(torch.float32)  # inf - inf and nan - nan are nan, which differs from 0
        return self._flag

    def norm(self, kind: float) -> Tensor:
        """Return the norm of the gradients as the optimizer would see them now: 0-dim."""
        pending = self.pending()
        norm = self._raw_norm(kind) if pending is None else self._raw_norm(kind) / pending
        return norm if _hold_double(self.tensors) else norm.to(torch.float32)

    @property
    def knows_norm(self) -> bool:
        """Whether the L2 norm has been measured."""
        return 2.0 in self._norms

    def norm_before_clipping(self) -> Tensor:
        """Return the L2 norm of the unscaled gradients, with whatever hooks divided out put back: 0-dim."""
        norm = self.norm(2.0)
        return norm if self.clipped is None else norm * self.clipped

    def divide(self, by: Tensor) -> None:
        """Put a divisor on the gradients, to be applied with the others."""
        self.divisor = by if self.divisor is None else self.divisor * by
        self.clipped = by if self.clipped is None else self.clipped * by
        self._product = None

    def pending(self) -> Tensor | None:
        """Return the product of everything still to be divided out, or None."""
        if self.scale is None or self.divisor is None:
            return self.divisor if self.scale is None else self.scale
        return self.pending_product()

    def pending_product(self) -> Tensor:
        """Return loss scale times clipping factor, both of which are pending."""
        if self._product is None:
            assert self.scale is not None
            assert self.divisor is not None
            self._product = self.scale * self.divisor
        return self._product

    def materialise(self) -> None:
        """Divide everything pending out of ``.grad``, in one division."""
        pending = self.pending()
        if pending is not None:
            for device, tensors in _by_device(self.tensors).items():
                torch._foreach_div_(tensors, pending.to(device))
            self._settled(pending)
            self.scale = self.divisor = self._product = None

    def settle_scale(self) -> None:
        """Note that somebody else has divided the loss scale out of ``.grad``."""
        if self.scale is not None:
            self._settled(self.scale)
            self.scale = self._product = None

    def why_not_folded(self) -> str:
        """Return why the optimizer cannot divide in its own pass, with the same bits; empty if it can."""
        optimizer: Any = self.optimizer
        fused = all(group.get("fused") for group in optimizer.param_groups)
        if not (fused and getattr(optimizer, "_step_supports_amp_scaling", False)):
            return "the optimizer is not fused"
        if not type(optimizer).__module__.startswith("torch.optim") or optimizer._optimizer_step_pre_hooks:
            return "code around the optimizer's step may look at gradients"
        if any(tensor.dtype != torch.float32 for tensor in self.tensors):
            return "gradients are not float32"
        return ""

    @contextmanager
    def divided_by_optimizer(self) -> Iterator[None]:
        """Have the optimizer's step inside the block divide by what is pending."""
        pending = self.pending()
        assert pending is not None
        optimizer: Any = self.optimizer  # torch's fused optimizers look for this attribute, as its GradScaler sets it
        optimizer.grad_scale = pending.to(torch.float32)
        try:
            yield
        finally:
            del optimizer.grad_scale
        self._settled(pending)
        self.scale = self.divisor = self._product = None

    def _settled(self, pending: Tensor) -> None:
        if self._norms:
            self._divided = pending if self._divided is None else self._divided * pending

    def _raw_norm(self, kind: float) -> Tensor:
        """Return the norm of what lies in ``.grad``, pending factors included."""
        if kind not in self._norms:
            norm = _norm(self.tensors, kind)
            self._norms[kind] = norm if self._divided is None else norm * self._divided
        return self._norms[kind] if self._divided is None else self._norms[kind] / self._divided


def _norm(tensors: list[Tensor], kind: float) -> Tensor:
    norm = _norm_in(tensors, kind, exact=tensors[0].device.type == "cuda")
    if norm.device.type == "cpu" and not _IN_RANGE[0] < _on_host(norm) < _IN_RANGE[1]:
        norm = _norm_in(tensors, kind, exact=True)
        peak = _on_host(_norm_in(tensors, math.inf, exact=True))
        if not math.isfinite(_on_host(norm)) and math.isfinite(peak):  # a float64 sum of squares has overflowed
            norm = peak * _norm_in([tensor / peak for tensor in tensors], kind, exact=True)
    return norm


def _on_host(norm: Tensor) -> float:
    value: Any = norm.tolist()  # memory of the host is read without waiting
    return float(value)


def _norm_in(tensors: list[Tensor], kind: float, *, exact: bool) -> Tensor:
    """Return the norm, accumulated in float64 if `exact` (on a GPU the walk over memory hides it), else in float32."""
    device = tensors[0].device
    parts: list[Tensor] = []
    for group in _by_device(tensors).values():
        wide = _hold_double(group) or (exact and device.type != "mps")
        accumulate = torch.float64 if wide else torch.float32
        parts.extend(part.to(device) for part in torch._foreach_norm(group, kind, dtype=accumulate))
    dtype = torch.float64 if any(part.dtype == torch.float64 for part in parts) else parts[0].dtype
    norm: Tensor = torch.linalg.vector_norm(torch.stack([part.to(dtype) for part in parts]), kind)
    return norm


def _hold_double(tensors: list[Tensor]) -> bool:
    return any(tensor.dtype == torch.float64 for tensor in tensors)


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
