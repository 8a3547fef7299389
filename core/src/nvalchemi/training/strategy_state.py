"""What a strategy keeps, as plain data, and the way back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from nvalchemi.errors import CheckpointMismatchError
from nvalchemi.training.on_demand import OnDemand
from nvalchemi.training.plain import Copied, host_copy, on_host
from nvalchemi.training.rng import capture_rng, restore_rng
from nvalchemi.training.state_shape import COUNTERS, check_state
from nvalchemi.training.trained_state import (
    check_gradients,
    check_models,
    check_steppers,
    gradients_of,
    load_gradients,
    load_models,
    load_steppers,
    may_refuse,
    model_states,
    stepper_states,
)
from nvalchemi.training.validation import ValidationResult

if TYPE_CHECKING:
    from nvalchemi.training.strategy import TrainingStrategy

__all__ = ["load_into", "state_of"]

_BATCH_COUNTERS = ("batch_count", "epoch_step_count", "epoch")


def state_of(strategy: TrainingStrategy) -> dict[str, Any]:
    """Return the state of a strategy; see `TrainingStrategy.state_dict`."""
    outcome = strategy.orchestrator.resolve()
    if strategy._position.in_batch:
        raise RuntimeError(
            "The state was asked for in the middle of a batch, which cannot be gone on with; ask for it at "
            "AFTER_BATCH, AFTER_EPOCH, AFTER_VALIDATION or AFTER_TRAINING, or between two batches."
        )
    copied: Copied = {}
    state = {
        "models": model_states(strategy.models, copied),
        "optimizers": stepper_states(strategy.optimizers, copied),
        "schedulers": stepper_states(strategy.lr_schedulers, copied),
        "hooks": on_host(strategy._hook_states.state_dict()),
        "run": _run_of(strategy),
        "position": strategy._position.state_dict(),
    }
    if not strategy._position.stepped:  # an open window goes on with them; else the next batch zeroes them
        state["gradients"] = gradients_of(strategy.models)
        state["window_open"] = outcome is not None and outcome.window_open
    return state


def load_into(strategy: TrainingStrategy, state: Mapping[str, Any], fresh: Collection[str]) -> None:
    """Give a strategy a state; see `TrainingStrategy.load_state_dict`."""
    strategy.orchestrator.resolve()  # it belongs to what is left behind
    check_state(state)
    if state["run"]["is_set_up"]:
        strategy.setup()  # a hook may change models there; it happens before the first batch anyway
    _check_fit(strategy, state, fresh)
    own = _as_it_is if isinstance(state, OnDemand) else host_copy  # optimizers keep the tensors they are given
    with ExitStack() as undo:
        undo.callback(restore_rng, capture_rng())  # whoever loads in a way of its own may draw
        strategy._hook_states.load(state["hooks"], fresh, undo)
        load_steppers(strategy.lr_schedulers, own(state["schedulers"]), undo)
        _load_run(strategy, state["run"], undo)
        undo.callback(vars(strategy._position).update, dict(vars(strategy._position)))
        strategy._position.load_state_dict(state["position"])
        loaded = capture_rng()
        late = any(map(may_refuse, strategy.models.values())) or any(map(may_refuse, strategy.optimizers))
        careful = undo if late else None  # it keeps a copy of each, which costs memory
        load_models(strategy.models, state["models"], careful)
        load_steppers(strategy.optimizers, own(state["optimizers"]), careful)
        undo.pop_all()  # nobody refused
    load_gradients(strategy.models, state.get("gradients", {}))
    strategy.orchestrator.go_on(window_open=state.get("window_open", False))
    restore_rng(loaded)


def _check_fit(strategy: TrainingStrategy, state: Mapping[str, Any], fresh: Collection[str]) -> None:
    check_models(strategy.models, state["models"])
    strategy._hook_states.check(state["hooks"], fresh)
    if not state["run"]["is_set_up"] and strategy.optimizers:
        raise CheckpointMismatchError(
            "The state is that of a run before its first batch, but this strategy has optimizers already; load it into "
            "a new one."
        )
    check_steppers("optimizer", strategy.optimizers, state["optimizers"])
    check_steppers("scheduler", strategy.lr_schedulers, state["schedulers"])
    check_gradients(strategy.models, state.get("gradients", {}))


def _as_it_is(value: Any) -> Any:
    return value


def _run_of(strategy: TrainingStrategy) -> dict[str, Any]:
    result = strategy.validation_result
    return {
        "counters": {name: getattr(strategy, name) for name in COUNTERS},
        "is_set_up": strategy._is_set_up,
        "unit": _unit(strategy),
        "began_at": None if strategy._goal is None else strategy._goal - _length(strategy),
        "validated_at": strategy._validated_at,
        "validation": result and {"losses": dict(result), "weights": result.weights, "batches": result.batches},
        "last_calls": strategy._hook_states.last_calls(strategy.registry),
    }


def _load_run(strategy: TrainingStrategy, run: Mapping[str, Any], undo: ExitStack) -> None:
    steps, counters = strategy._steps, run["counters"]
    undo.callback(vars(steps).update, dict(vars(steps)))
    for name in (*_BATCH_COUNTERS, "_goal", "_validated_at", "validation_result"):
        undo.callback(setattr, strategy, name, getattr(strategy, name))
    hooks, registry = strategy._hook_states, strategy.registry
    undo.callback(hooks.set_last_calls, registry, hooks.last_calls(registry))
    steps.known, steps.known_globally = counters["step_count"], counters["global_step_count"]
    for name in _BATCH_COUNTERS:
        setattr(strategy, name, counters[name])
    under_way = run["began_at"] is not None and run["unit"] == _unit(strategy)
    strategy._goal = run["began_at"] + _length(strategy) if under_way else None
    strategy._validated_at = run["validated_at"]
    saved = run["validation"]
    strategy.validation_result = saved and ValidationResult(
        saved["losses"], weights=saved["weights"], batches=saved["batches"]
    )
    hooks.set_last_calls(registry, run["last_calls"])


def _unit(strategy: TrainingStrategy) -> str:
    return "steps" if strategy.num_steps else "epochs"


def _length(strategy: TrainingStrategy) -> int:
    return strategy.num_steps or strategy.num_epochs or 0
