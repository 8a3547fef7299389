"""Stepping an optimizer of ``torch.optim`` in its own fused pass, with divisor and veto taken along."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import adagrad, adam, adamw, sgd
from torch.optim import optimizer as torch_optimizer

from nvalchemi.training.hooks import fused_adam
from nvalchemi.training.hooks.plan import OptimizerPlan
from nvalchemi.training.sharding import any_sharded, local_part, local_parts, placed_alike

__all__ = ["StockExecutor", "code_around_step", "nobody_around", "why_not_folded"]


_grad = attrgetter("grad")
_adam_state = itemgetter("exp_avg", "exp_avg_sq", "step")


def why_not_folded(optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor]) -> str:
    """Return why an optimizer cannot divide in its own pass, with the same bits; empty if it can."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return "the optimizer is not fused"
    if not all(group.get("fused") for group in optimizer.param_groups):
        return "the optimizer is not fused"
    if code := code_around_step(optimizer):
        return code
    if any(gradient.dtype != torch.float32 for gradient in gradients):
        return "gradients are not float32"
    own = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if any_sharded(own) and not placed_alike(own, [p.grad for p in own]):
        return "gradients are not spread over the ranks as their parameters are"
    return ""


def code_around_step(optimizer: torch.optim.Optimizer) -> str:
    """Return why somebody's code may look at gradients when the optimizer steps; empty if nobody's can."""
    before: Any = optimizer  # hooks before a step have no public list
    if type(optimizer).__module__.startswith("torch.optim") and not (
        before._optimizer_step_pre_hooks or torch_optimizer._global_optimizer_pre_hooks
    ):
        return ""
    return "code around the optimizer's step may look at gradients"


class StockExecutor:
    """Steps the fused optimizers of ``torch.optim``.

    The first step of an optimizer goes through its ``step()``, which makes its state; so does every step that somebody
    hooks into. Afterwards the same kernel is called on lists that are kept: through the public functional form, or, for
    Adam and AdamW on tensors of one kind, by itself (`fused_adam`). Of parameters that are spread over ranks every rank
    steps the part it holds, in the same way.
    Everything else is refused, and so is a veto on the device where there is no complete state to be left alone.
    """

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[torch.optim.Optimizer, _Kept] = WeakKeyDictionary()

    def execute(self, plan: OptimizerPlan) -> bool:
        """Step, or return False and change nothing."""
        optimizer = plan.optimizer
        kept = self._kept.get(optimizer)
        if kept is not None and (kept.holds(optimizer, plan.parameters) or kept.follows(optimizer, plan.parameters)):
            kept.step(plan)
            return True
        if plan.veto_flag is not None or why_not_folded(optimizer, [p.grad for p in plan.parameters]):  # type: ignore[misc]
            return False
        _step_through(optimizer, plan)
        if type(optimizer) in _ALGORITHMS:
            self._kept[optimizer] = _Kept()
        return True

    def __reduce__(self) -> tuple[type[StockExecutor], tuple[()]]:
        return StockExecutor, ()  # lists are made anew where the optimizers are


def _step_through(optimizer: Any, plan: OptimizerPlan) -> None:
    """Call ``step()``; torch's fused optimizers look for the attribute, as its GradScaler sets it."""
    if plan.divisor is None:
        optimizer.step()
        return
    optimizer.grad_scale = plan.divisor
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale


class _Kept:
    """The lists of an optimizer that has stepped before, and by what one sees that they still hold."""

    def __init__(self) -> None:
        self._parameters: Sequence[Tensor] | None = None
        self._sharded = False
        self._groups: list[dict[str, Any]] = []
        self._states: list[dict[str, Any]] = []
        self._lists: list[tuple[list[Tensor], list[dict[str, Any]], bool]] = []
        self._switches: list[tuple[Any, ...]] = []
        self._no_grad = torch.no_grad()  # made once: making one takes as long as a small operation

    def holds(self, optimizer: Any, parameters: Sequence[Tensor]) -> bool:
        """Return whether nothing has changed but numbers: settings, weights, gradients and what the state holds."""
        state: Mapping[Tensor, dict[str, Any]] = optimizer.state
        groups: list[dict[str, Any]] = optimizer.param_groups
        return (
            groups is self._groups
            and len(groups) == len(self._lists)
            and parameters is self._parameters
            and len(state) == len(self._states)
            and all(map(is_, state.values(), self._states))  # load_state_dict makes new ones
            and list(map(_switches, groups)) == self._switches
            and nobody_around(optimizer)
            and (not self._sharded or placed_alike(parameters, [p.grad for p in parameters]))  # type: ignore[misc]
        )

    def follows(self, optimizer: Any, parameters: Sequence[Tensor]) -> bool:
        """Make the lists anew, and return whether every parameter has the state that it needs."""
        if why_not_folded(optimizer, [p.grad for p in parameters]) or not nobody_around(optimizer):  # type: ignore[misc]
            return False
        lists = []
        for group in optimizer.param_groups:
            own = [p for p in group["params"] if p.grad is not None]
            states = [optimizer.state.get(p, {}) for p in own]
            needed = _ALGORITHMS[type(optimizer)].needs(group)
            if any(name not in one or one[name] is None for one in states for name in needed):
                return False
            lists.append((own, states, fused_adam.are_alike(local_parts(own))))
        self._lists, self._parameters, self._sharded = lists, parameters, any_sharded(parameters)
        self._switches = list(map(_switches, optimizer.param_groups))
        self._groups = optimizer.param_groups
        self._states = list(optimizer.state.values())
        return True

    def step(self, plan: OptimizerPlan) -> None:
        """Call the fused kernel on every group."""
        run = _ALGORITHMS[type(plan.optimizer)].run
        with self._no_grad:
            for group, (own, states, alike) in zip(plan.optimizer.param_groups, self._lists, strict=True):
                if own:
                    grads = list(map(_grad, own))
                    lists = _local(own, grads, states) if self._sharded else (own, grads, states)
                    run(group, *lists, alike, grad_scale=plan.divisor, found_inf=plan.veto_flag)


def _local(
    own: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
) -> tuple[list[Tensor], list[Tensor], list[dict[str, Any]]]:
    """Return what this rank holds of parameters, gradients and state; the arithmetic goes element by element."""
    held = [{name: local_part(value) for name, value in state.items()} for state in states]
    return local_parts(own), local_parts(grads), held


def _switches(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the settings that say which state there is."""
    get = group.get
    return get("fused"), get("differentiable"), get("amsgrad"), get("momentum", 0) != 0


def nobody_around(optimizer: Any) -> bool:
    """Return whether ``step()`` is torch's own and nobody has hooked into it, a scheduler's mark apart."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    if torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks:
        return False
    step = vars(optimizer).get("step")
    if step is None:
        return True
    # A scheduler wraps step() to see that one came before its own; what it wraps must be torch's, and have been called.
    return getattr(step, "__wrapped__", None) is type(optimizer).step and getattr(optimizer, "_opt_called", False)


class _Algorithm(NamedTuple):
    """A fused algorithm: the state it needs, and the call of its functional form."""

    needs: Callable[[Mapping[str, Any]], tuple[str, ...]]
    run: Callable[..., None]


def _are_plain(lr: Any, beta1: Any, beta2: Any, amp: Mapping[str, Tensor | None], device: torch.device) -> bool:
    """Return whether settings are numbers, and divisor and veto are where the parameters are."""
    for one in amp.values():
        if one is not None and one.device != device:
            return False
    return type(lr) is float and type(beta1) is float and type(beta2) is float


def _column(states: list[dict[str, Any]], name: str) -> list[Tensor]:
    return list(map(itemgetter(name), states))


def _adam_needs(group: Mapping[str, Any]) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "step", *(["max_exp_avg_sq"] if group["amsgrad"] else []))


def _run_adam(
    group: Mapping[str, Any],
    own: list[Tensor],
    grads: list[Tensor],
    states: list[dict[str, Any]],
    alike: bool,
    **amp: Any,
) -> None:
    beta1, beta2 = group["betas"]
    decoupled = group["decoupled_weight_decay"]
    averages, squares, steps = map(list, zip(*map(_adam_state, states), strict=True))
    largest = _column(states, "max_exp_avg_sq") if group["amsgrad"] else []
    columns = (own, grads, averages, squares, largest, steps)
    settings = {
        "amsgrad": group["amsgrad"],
        "lr": group["lr"],
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": group["weight_decay"],
        "eps": group["eps"],
        "maximize": group["maximize"],
        **amp,
    }
    if alike and fused_adam.agrees(decoupled) and _are_plain(group["lr"], beta1, beta2, amp, own[0].device):
        fused_adam.step_(*columns, decoupled=decoupled, **settings)
    else:
        algorithm = adamw.adamw if decoupled else adam.adam
        algorithm(*columns, foreach=False, fused=True, capturable=group["capturable"], **settings)


def _run_sgd(
    group: Mapping[str, Any],
    own: list[Tensor],
    grads: list[Tensor],
    states: list[dict[str, Any]],
    alike: bool,
    **amp: Any,
) -> None:
    momentum = group["momentum"]
    sgd.sgd(
        own,
        grads,
        _column(states, "momentum_buffer") if momentum else [None] * len(own),  # type: ignore[arg-type]
        foreach=False,
        fused=True,
        weight_decay=group["weight_decay"],
        momentum=momentum,
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        **amp,
    )


def _run_adagrad(
    group: Mapping[str, Any],
    own: list[Tensor],
    grads: list[Tensor],
    states: list[dict[str, Any]],
    alike: bool,
    **amp: Any,
) -> None:
    adagrad.adagrad(
        own,
        grads,
        _column(states, "sum"),
        _column(states, "step"),
        foreach=False,
        fused=True,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        lr_decay=group["lr_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        **amp,
    )


_ADAM = _Algorithm(_adam_needs, _run_adam)
_ALGORITHMS: dict[type[torch.optim.Optimizer], _Algorithm] = {
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.SGD: _Algorithm(lambda group: ("momentum_buffer",) if group["momentum"] else (), _run_sgd),
    torch.optim.Adagrad: _Algorithm(lambda group: ("sum", "step"), _run_adagrad),
}
