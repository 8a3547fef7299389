"""From the plan of a step to batches that one launch can update, or to the reason why not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nvalchemi_hooks_triton.kernels import KINDS, Batch, Rule

if TYPE_CHECKING:
    from nvalchemi.training.hooks import AverageOffer, OptimizerPlan

__all__ = [
    "CannotTakeError",
    "Work",
    "check_gradients",
    "check_operands",
    "rule_of",
    "sorted_into_batches",
    "takeable_offers",
]

_PLAIN = {Tensor, torch.nn.Parameter}
_LIKE = "of the dtype and on the device of their weights"
_DTYPE, _DEVICE, _LAYOUT = attrgetter("dtype"), attrgetter("device"), attrgetter("layout")


class CannotTakeError(Exception):
    """Why a plan is left to somebody else, in words for `describe`."""


class Work(NamedTuple):
    """A batch, the rule it follows, and where both come from: this is the same in the next step.

    Attributes
    ----------
    group : int
        The place of its parameter group.
    dtype : torch.dtype
        That of its weights.
    offer : int or None
        The place of its average among the offers that are taken.
    """

    group: int
    dtype: torch.dtype
    offer: int | None
    batch: Batch
    rule: Rule


class _Row(NamedTuple):
    """The average of a weight: the place of its offer, what is averaged, and its rounded copy if there is one."""

    offer: int
    average: Tensor
    rounded: Tensor | None


def takeable_offers(plan: OptimizerPlan) -> list[AverageOffer]:
    """Return the offers of which every pair can be averaged with the weights: each weight in one offer at most."""
    stepped = {id(parameter): parameter for parameter in plan.parameters}
    taken: list[AverageOffer] = []
    for offer in plan.averages:
        live = [id(tensor) for tensor in offer.live]
        if len(set(live)) == len(live) and all(key in stepped for key in live) and _is_usable(offer):
            for key in live:
                del stepped[key]
            taken.append(offer)
    return taken


def sorted_into_batches(plan: OptimizerPlan, offers: Sequence[AverageOffer]) -> list[Work]:
    """Return all that has to be done in a step.

    Parameters
    ----------
    plan : nvalchemi.training.hooks.OptimizerPlan
        The step of one optimizer.
    offers : sequence of nvalchemi.training.hooks.AverageOffer
        Those that are taken along.

    Raises
    ------
    CannotTakeError
        There is something in the plan that the programs do not know; the message says what.
    """
    optimizer = plan.optimizer
    _expect(
        type(optimizer) in (torch.optim.Adam, torch.optim.AdamW), f"{type(optimizer).__name__} is not Adam or AdamW"
    )
    _expect(len(plan.parameters) > 0, "no parameter has a gradient")
    device = plan.parameters[0].device
    rows = _rows_of_averages(offers)
    work: list[Work] = []
    for place, group in enumerate(optimizer.param_groups):
        rule = rule_of(group, device)
        for (dtype, offer), weights in _alike(group["params"], rows).items():
            batch = _batch(optimizer, weights, rows, 0.0 if offer is None else offers[offer].weight)
            _check(batch, dtype, device)
            work.append(Work(place, dtype, offer, batch, rule))
    count = sum(len(one.batch.weights) for one in work)
    _expect(count == len(plan.parameters), "the plan does not hold the parameters that have gradients")
    return work


def rule_of(group: Mapping[str, Any], device: torch.device) -> Rule:
    """Return the settings of a parameter group as they are now."""
    _expect(bool(group["fused"]), "the optimizer is not fused")
    _expect(not group["amsgrad"], "amsgrad is asked for")
    _expect(not any(isinstance(beta, Tensor) for beta in group["betas"]), "betas are tensors")
    lr = group["lr"]
    if isinstance(lr, Tensor):
        _expect(
            lr.numel() == 1 and lr.device in (device, torch.device("cpu")), "the learning rate is on another device"
        )
    on_device = isinstance(lr, Tensor) and lr.device == device  # memory of the host is read without waiting
    return Rule(
        lr=lr if on_device else float(lr),
        betas=tuple(map(float, group["betas"])),  # type: ignore[arg-type]
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=bool(group["decoupled_weight_decay"]),
        maximize=bool(group["maximize"]),
    )


def _alike(parameters: Iterable[Tensor], rows: dict[int, _Row]) -> dict[tuple[torch.dtype, int | None], list[Tensor]]:
    """Sort weights that have gradients by what a launch has to be told about them."""
    sorted_: dict[tuple[torch.dtype, int | None], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            row = rows.get(id(parameter))
            sorted_.setdefault((parameter.dtype, None if row is None else row.offer), []).append(parameter)
    return sorted_


def _batch(optimizer: torch.optim.Optimizer, weights: list[Tensor], rows: dict[int, _Row], share: float) -> Batch:
    states = [optimizer.state.get(weight, {}) for weight in weights]
    try:
        firsts, seconds, steps = ([one[name] for one in states] for name in ("exp_avg", "exp_avg_sq", "step"))
    except KeyError:  # nothing is there before the first step
        raise CannotTakeError("the first step makes the state, and is torch's") from None
    gradients: list[Any] = [weight.grad for weight in weights]
    own = [rows[id(weight)] for weight in weights] if id(weights[0]) in rows else []
    averages = [row.average for row in own] or None
    rounded = [row.rounded for row in own if row.rounded is not None] or None
    return Batch(weights, gradients, firsts, seconds, steps, averages, rounded, share)


def check_operands(plan: OptimizerPlan) -> None:
    """Refuse a divisor and a veto that the programs cannot read where the weights are."""
    for operand in (plan.divisor, plan.veto_flag):
        there = operand is None or operand.device == plan.parameters[0].device
        _expect(there, "divisor and veto are not on the device of the weights")


def check_gradients(batch: Batch) -> None:
    """Refuse gradients that are not like their weights; they are other tensors in every step."""
    weight = batch.weights[0]
    _expect(_is_column(batch.gradients, weight.dtype, weight.device), "gradients are not dense, contiguous, " + _LIKE)
    _expect(_sizes(batch.gradients) == _sizes(batch.weights), "gradients do not have the size of their weights")


def _check(batch: Batch, dtype: torch.dtype, device: torch.device) -> None:
    _expect(dtype in KINDS, f"weights are {dtype}")
    _expect(_is_column(batch.weights, dtype, device), "weights are not dense, contiguous and on one device")
    check_gradients(batch)
    _expect(_is_column(batch.firsts + batch.seconds, dtype, device), "moments are not dense, contiguous, " + _LIKE)
    sizes = _sizes(batch.weights)
    _expect(_sizes(batch.firsts) == _sizes(batch.seconds) == sizes, "moments do not have the size of their weights")
    _expect(_is_column(batch.steps, torch.float32, device), "step counters are not float32 and on the device")


def _is_usable(offer: AverageOffer) -> bool:
    averages = offer.averages if offer.accumulators is None else offer.accumulators
    device = offer.live[0].device if offer.live else torch.device("cpu")
    sizes = _sizes(offer.live)
    rounded = (offer.averages, offer.live) if offer.accumulators is not None else ()
    return (
        len(sizes) > 0
        and _is_column(averages, torch.float32, device)
        and _sizes(averages) == _sizes(offer.averages) == sizes
        and all(_is_column(column, offer.live[0].dtype, device) for column in rounded)
    )


def _rows_of_averages(offers: Sequence[AverageOffer]) -> dict[int, _Row]:
    rows: dict[int, _Row] = {}
    for place, offer in enumerate(offers):
        accumulators = offer.accumulators
        for n, (live, average) in enumerate(zip(offer.live, offer.averages, strict=True)):
            rows[id(live)] = (
                _Row(place, average, None) if accumulators is None else _Row(place, accumulators[n], average)
            )
    return rows


def _is_column(tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> bool:
    return (
        set(map(type, tensors)) <= _PLAIN
        and set(map(_DTYPE, tensors)) == {dtype}
        and set(map(_DEVICE, tensors)) == {device}
        and set(map(_LAYOUT, tensors)) == {torch.strided}
        and all(map(Tensor.is_contiguous, tensors))
    )


def _sizes(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.numel, tensors))


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise CannotTakeError(otherwise)
