"""Models, optimizers and schedulers to plain data and back; all is checked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from nvalchemi.errors import CheckpointError, CheckpointMismatchError, NotPlainDataError
from nvalchemi.training.plain import Copied, host_copy
from nvalchemi.training.saved_tensor import SavedTensor, placed, placed_moments
from nvalchemi.training.shape import Each
from nvalchemi.training.state_shape import check_shape
from nvalchemi.training.unwrap import bare_module

__all__ = [
    "check_gradients",
    "check_model",
    "check_models",
    "check_steppers",
    "gradients_of",
    "load_gradients",
    "load_models",
    "load_steppers",
    "may_refuse",
    "model_states",
    "placed_in",
    "refuse_lazy",
    "stepper_states",
]

_ELSEWHERE = "or load the models alone"
_OPTIMIZER = {"class": str, "shapes": [[[int]]], "state": {"state": {}, "param_groups": [{"params": [int]}]}}
_SHAPES = {"optimizer": [_OPTIMIZER], "scheduler": [{"class": str, "state": {}}]}
_LIKE_PARAMETERS = (  # what torch's own optimizers keep in the shape of the parameter
    "acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer", "prev",
    "square_avg", "step_size", "sum",
)  # fmt: skip
_WAYS_TO_LOAD = ("load_state_dict", "_load_from_state_dict", "set_extra_state")


def model_states(models: Mapping[str, nn.Module], copied: Copied) -> dict[str, Any]:
    """Return the states of models, under the names they have without wrappers."""
    for name, model in models.items():
        refuse_lazy(name, model, NotPlainDataError)
    return {name: host_copy(dict(bare_module(model).state_dict()), copied=copied) for name, model in models.items()}


def gradients_of(models: Mapping[str, nn.Module]) -> dict[str, dict[str, Tensor]]:
    """Return the gradients that are there, by model and parameter."""
    return {
        key: {name: host_copy(p.grad) for name, p in bare_module(model).named_parameters() if p.grad is not None}
        for key, model in models.items()
    }


def stepper_states(steppers: Sequence[Any], copied: Copied) -> list[dict[str, Any]]:
    """Return class and state of optimizers or schedulers; of optimizers also the shapes of what they train."""
    return [
        {
            "class": _class_name(stepper),
            "state": host_copy(stepper.state_dict(), copied=copied),
            **({"shapes": _shapes(stepper)} if isinstance(stepper, torch.optim.Optimizer) else {}),
        }
        for stepper in steppers
    ]


def check_models(models: Mapping[str, nn.Module], states: Mapping[str, Any]) -> None:
    """Refuse states that do not fit models: by model, tensor, and both shapes."""
    check_shape(states, {}, "models")
    if set(models) != set(states):
        raise CheckpointMismatchError(
            f"The checkpoint holds the models {sorted(states)}, but the run has {sorted(models)}; use the same names."
        )
    for name, model in models.items():
        refuse_lazy(name, model, CheckpointMismatchError)
        bare = bare_module(model)
        check_model(name, bare, placed_in(bare, states[name]))


def placed_in(model: nn.Module, state: Any) -> Any:
    """Return a saved state spread over ranks as a model is."""
    return placed(state, model.state_dict()) if isinstance(state, Mapping) else state


def refuse_lazy(name: str, model: nn.Module, kind: type[CheckpointError]) -> None:
    """Refuse a model with parameters that have no shape before the first batch: its state is none yet."""
    module = bare_module(model)
    for key, tensor in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise kind(
                f"{name}.{key} belongs to a lazy module and has no shape yet, so it can neither be saved nor loaded; "
                "call the model on a batch right after it is made, as torch asks for before an optimizer is made."
            )


def check_model(name: str, model: nn.Module, state: Mapping[str, Any]) -> None:
    """Refuse a state that does not fit a model, before anything is changed."""
    check_shape(state, {}, f"models[{name!r}]")
    own = model.state_dict()
    missing, extra = [key for key in own if key not in state], [key for key in state if key not in own]
    if missing or extra:
        raise CheckpointMismatchError(
            f"The checkpoint's model {name!r} does not fit the {type(model).__name__}: "
            f"{_some('not in the file', missing)}{'; ' if missing and extra else ''}"
            f"{_some('not in the model', extra)}. Build the model as it was when it was saved."
        )
    for key, tensor in own.items():
        saved = state[key]
        if not isinstance(tensor, Tensor) or nn.parameter.is_lazy(tensor):
            continue
        if not isinstance(saved, Tensor) or saved.shape != tensor.shape or saved.dtype != tensor.dtype:
            raise CheckpointMismatchError(
                f"{name}.{key} is {_described(saved)} in the checkpoint, but {_described(tensor)} in the "
                f"{type(model).__name__}; build the model as it was when it was saved."
            )


def check_steppers(kind: str, steppers: Sequence[Any], states: Sequence[Mapping[str, Any]]) -> None:
    """Refuse states that do not fit optimizers or schedulers (`kind`, for messages)."""
    check_shape(states, _SHAPES[kind], f"{kind}s")
    own, saved = [_class_name(stepper) for stepper in steppers], [state["class"] for state in states]
    if own != saved:
        raise CheckpointMismatchError(
            f"The checkpoint holds the {kind}s {saved}, but the run has {own}; configure the same ones, {_ELSEWHERE}."
        )
    for place, (stepper, state) in enumerate(zip(steppers, states, strict=True)):
        if kind != "optimizer":
            continue
        if state["shapes"] != _shapes(stepper):
            raise CheckpointMismatchError(
                f"{kind} {place} ({own[place]}) trains parameters of the shapes {_shapes(stepper)}, but those in the "
                f"checkpoint are {state['shapes']}; give it the same parameters in the same groups, {_ELSEWHERE}."
            )
        _check_moments(stepper, state["state"], f"optimizers[{place}]['state']")


def check_gradients(models: Mapping[str, nn.Module], gradients: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Refuse gradients of parameters that are not there, or have another shape or dtype."""
    check_shape(gradients, Each({}), "gradients")
    for key, saved in gradients.items():
        own = dict(bare_module(models[key]).named_parameters()) if key in models else {}
        for name, gradient in saved.items():
            expected = own.get(name)
            if not isinstance(gradient, Tensor | SavedTensor) or expected is None or not _alike(gradient, expected):
                fits = f"is {_described(expected)}" if expected is not None else "is not there"
                raise CheckpointMismatchError(
                    f"The gradient of {key}.{name} is {_described(gradient)} in the checkpoint, but the parameter "
                    f"{fits}; build the model as it was when it was saved."
                )


def may_refuse(part: nn.Module | torch.optim.Optimizer) -> bool:
    """Return whether a part could still refuse a state that was checked, because it loads in a way of its own."""
    if not isinstance(part, nn.Module):
        hooks = (part._optimizer_load_state_dict_pre_hooks, part._optimizer_load_state_dict_post_hooks)
        return any(hooks) or not type(part).__module__.startswith("torch.")
    return any(map(_loads_its_own_way, bare_module(part).modules()))


def load_models(models: Mapping[str, nn.Module], states: Mapping[str, Any], undo: ExitStack | None) -> None:
    """Copy checked states into models; `undo` is told how each gets back what it had."""
    for name, model in models.items():
        bare = bare_module(model)
        if undo is not None:
            undo.callback(bare.load_state_dict, host_copy(dict(bare.state_dict())))
        bare.load_state_dict(placed_in(bare, states[name]))


def load_steppers(steppers: Sequence[Any], states: Sequence[Mapping[str, Any]], undo: ExitStack | None) -> None:
    """Give optimizers or schedulers checked states, to keep; `undo` is told how each gets back what it had."""
    for stepper, state in zip(steppers, states, strict=True):
        if undo is not None:
            undo.callback(stepper.load_state_dict, host_copy(stepper.state_dict()))
        saved = state["state"]
        if isinstance(stepper, torch.optim.Optimizer):
            saved = _placed_for(stepper, saved)
        stepper.load_state_dict(saved)
        if isinstance(stepper, torch.optim.Optimizer):
            _give_dtypes_back(stepper, saved)


def load_gradients(models: Mapping[str, nn.Module], gradients: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Give parameters the checked gradients of a window that was open; all others have none."""
    for key, model in models.items():
        saved = gradients.get(key, {})
        for name, parameter in bare_module(model).named_parameters():
            parameter.grad = placed(saved[name], parameter).to(parameter.device, copy=True) if name in saved else None


def _placed_for(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved state spread over ranks as the parameters are that it belongs to."""
    moments = {
        place: placed_moments(state["state"][place], parameter)
        for place, parameter in _by_place(optimizer, state)
        if place in state["state"]
    }
    return {**state, "state": {**state["state"], **moments}}


def _give_dtypes_back(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Undo the cast of ``Optimizer.load_state_dict`` to the dtype of the parameter, which rounds fp32 state."""
    for place, parameter in _by_place(optimizer, state):
        for key, saved in state["state"].get(place, {}).items():
            loaded = optimizer.state[parameter].get(key)
            if isinstance(saved, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != saved.dtype:
                optimizer.state[parameter][key] = saved.to(loaded.device)


def _by_place(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> list[tuple[int, Tensor]]:
    """Return parameters with the numbers by which a state knows them."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    places = [place for group in state["param_groups"] for place in group["params"]]
    return list(zip(places, parameters, strict=True))


def _loads_its_own_way(module: nn.Module) -> bool:
    kind = type(module)
    own = [getattr(kind, name) is not getattr(nn.Module, name) for name in _WAYS_TO_LOAD]
    hooks = (module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks)
    return any(hooks) or (any(own) and not kind.__module__.startswith("torch."))


def _check_moments(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], where: str) -> None:
    saved, own = ([len(group["params"]) for group in one] for one in (state["param_groups"], optimizer.param_groups))
    if saved != own:
        raise CheckpointMismatchError(
            f"{where}['param_groups'] has groups of {saved} parameters, but the optimizer has groups of {own}; give it "
            f"the same parameters in the same groups, {_ELSEWHERE}."
        )
    for place, parameter in _by_place(optimizer, state):
        check_shape(moments := state["state"].get(place, {}), {}, f"{where}['state'][{place}]")
        for key, value in moments.items() if type(optimizer).__module__.startswith("torch.") else ():
            if key in _LIKE_PARAMETERS and isinstance(value, Tensor | SavedTensor) and value.shape != parameter.shape:
                raise CheckpointMismatchError(
                    f"{where}['state'][{place}][{key!r}] is {_described(value)}, but its parameter is "
                    f"{_described(parameter)}; give what save_training saved, {_ELSEWHERE}."
                )


def _alike(gradient: Tensor | SavedTensor, parameter: Tensor) -> bool:
    dtype = getattr(parameter, "grad_dtype", parameter.dtype)  # None, of newer versions of torch: any
    return gradient.shape == parameter.shape and dtype in (gradient.dtype, None)


def _shapes(optimizer: torch.optim.Optimizer) -> list[list[list[int]]]:
    return [[list(p.shape) for p in group["params"]] for group in optimizer.param_groups]


def _class_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _described(value: object) -> str:
    if not isinstance(value, Tensor | SavedTensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"


def _some(title: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{title}: {', '.join(names[:3])}{more}"
