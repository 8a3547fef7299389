"""Adam and AdamW by torch's fused operation itself.

The public form, ``torch.optim.adam.adam``, sorts all tensors by device and dtype at every step. For tensors that are
known to be of one kind, this calls what it calls in the end, with the same bits. The operation is private to torch, so
it is used only after `agrees` has seen that it does what the public form does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import adam

__all__ = ["agrees", "are_alike", "step_"]


def are_alike(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors are of one kind that the operation takes: one device, float32 or float64 throughout.

    Examples
    --------
    >>> are_alike([torch.zeros(2), torch.zeros(())]), are_alike([torch.zeros(2), torch.zeros(2, dtype=torch.float64)])
    (True, False)
    """
    kinds = {(tensor.device, tensor.dtype) for tensor in tensors}
    device, dtype = next(iter(kinds), (None, None))
    plain = all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)
    supported = device is not None and device.type in ("cpu", "cuda") and dtype in (torch.float32, torch.float64)
    return len(kinds) == 1 and plain and supported


def step_(
    parameters: list[Tensor],
    grads: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    largest: list[Tensor],
    steps: list[Tensor],
    *,
    decoupled: bool,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    **settings: Any,
) -> None:
    """Step, and count the step unless it is vetoed; parameters that require gradients want ``torch.no_grad()``.

    Parameters
    ----------
    parameters, grads, averages, squares : lists of torch.Tensor
        All of one kind; see `are_alike`.
    largest : list of torch.Tensor
        The maxima of `squares` with ``amsgrad``, else empty.
    steps : list of torch.Tensor
        float32, 0-dim, on the same device.
    decoupled : bool
        Whether weight decay is AdamW's.
    grad_scale, found_inf : torch.Tensor, optional
        0-dim float32 on the same device: the divisor of the gradients, and the veto, exactly 0 or 1.
    **settings
        ``amsgrad, lr, beta1, beta2, weight_decay, eps, maximize``: numbers and switches.

    Examples
    --------
    >>> weight, grad, average, square, count = ([torch.zeros(1)] for _ in range(5))
    >>> grad[0].fill_(1.0)
    tensor([1.])
    >>> count = [torch.zeros(())]
    >>> step_(weight, grad, [torch.zeros(1)], [torch.zeros(1)], [], count, decoupled=True, grad_scale=None,
    ...       found_inf=None, amsgrad=False, lr=0.5, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8, maximize=False)
    >>> weight, count
    ([tensor([-0.5000])], [tensor(1.)])
    """
    torch._foreach_add_(steps, [_one(steps[0].device)] * len(steps))
    operation = torch._fused_adamw_ if decoupled else torch._fused_adam_
    operation(
        parameters, grads, averages, squares, largest, steps, grad_scale=grad_scale, found_inf=found_inf, **settings
    )
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf] * len(steps))


@cache
def agrees(decoupled: bool) -> bool:
    """Return whether `step_` has the bits of the public form here; tried once a process, on a CPU.

    Examples
    --------
    >>> agrees(decoupled=True), agrees(decoupled=False)
    (True, True)
    """
    try:
        return all(_trial(decoupled, scale, veto) for scale, veto in ((None, None), (3.0, 0.0), (3.0, 1.0)))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False  # this torch has no such operation, or another signature; it promised neither


def _trial(decoupled: bool, scale: float | None, veto: float | None) -> bool:
    generator = torch.Generator().manual_seed(0)  # the user's own random numbers stay as they are
    sizes = (0, 1, 7, 64, 1031)  # whole vectors, tails, and both together
    drawn = [[torch.randn(size, generator=generator) for size in sizes] for _ in range(4)]
    drawn[3] = [square.abs() for square in drawn[3]]
    settings: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    settings |= {"amsgrad": False, "maximize": True}
    amp: dict[str, Any] = {
        "grad_scale": None if scale is None else torch.tensor(scale),
        "found_inf": None if veto is None else torch.tensor(veto),
    }
    results = []
    for public in (True, False):
        weights, grads, averages, squares = ([tensor.clone() for tensor in column] for column in drawn)
        steps = [torch.tensor(4.0) for _ in sizes]
        if public:
            options: dict[str, Any] = {"fused": True, "foreach": False, "decoupled_weight_decay": decoupled}
            adam.adam(weights, grads, averages, squares, [], steps, **options, **settings, **amp)
        else:
            step_(weights, grads, averages, squares, [], steps, decoupled=decoupled, **settings, **amp)
        results.append([*weights, *averages, *squares, *steps])
    return all(map(torch.equal, *results))


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)
