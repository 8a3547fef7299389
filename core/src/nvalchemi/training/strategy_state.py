"""What a strategy keeps, as plain data, and the way back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from nvalchemi.errors import CheckpointMismatchError
from nvalchemi.training.on_demand import OnDemand
from nvalchemi.training.plain import Copied, host_copy, on_host
from nvalchemi.training.trained_state import (
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

_COUNTERS = ("step_count", "global_step_count", "batch_count", "epoch_step_count", "epoch")


def state_of(strategy: TrainingStrategy) -> dict[str, Any]:
    """Return the state of a strategy; see `TrainingStrategy.state_dict`."""
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
    return state


def load_into(strategy: TrainingStrategy, state: Mapping[str, Any], fresh: Collection[str]) -> None:
    """Give a strategy a state; see `TrainingStrategy.load_state_dict`."""
    run = state["run"]
    if run["is_set_up"]:
        strategy.setup()  # a hook may change models there; it happens before the first batch anyway
    check_models(strategy.models, state["models"])
    strategy._hook_states.check(state["hooks"], fresh)
    if not run["is_set_up"] and strategy.optimizers:
        raise CheckpointMismatchError(
            "The state is that of a run before its first batch, but this strategy has optimizers already; load it into "
            "a new one."
        )
    check_steppers("optimizer", strategy.optimizers, state["optimizers"])
    check_steppers("scheduler", strategy.lr_schedulers, state["schedulers"])
    own = _as_it_is if isinstance(state, OnDemand) else host_copy  # optimizers keep the tensors they are given
    with ExitStack() as undo:
        strategy._hook_states.load(state["hooks"], fresh, undo)
        parts = [*strategy.models.values(), *strategy.optimizers, *strategy.lr_schedulers]
        careful = undo if any(map(may_refuse, parts)) else None  # it keeps a copy of each, which costs memory
        load_models(strategy.models, state["models"], careful)
        load_steppers(strategy.optimizers, own(state["optimizers"]), careful)
        load_steppers(strategy.lr_schedulers, own(state["schedulers"]), careful)
        undo.pop_all()  # nobody refused
    load_gradients(strategy.models, state.get("gradients", {}))
    _load_run(strategy, run)
    strategy._position.load_state_dict(state["position"])


def _as_it_is(value: Any) -> Any:
    return value


def _run_of(strategy: TrainingStrategy) -> dict[str, Any]:
    result = strategy.validation_result
    return {
        "counters": {name: getattr(strategy, name) for name in _COUNTERS},
        "is_set_up": strategy._is_set_up,
        "unit": _unit(strategy),
        "began_at": None if strategy._goal is None else strategy._goal - _length(strategy),
        "validated_at": strategy._validated_at,
        "validation": result and {"losses": dict(result), "weights": result.weights, "batches": result.batches},
        "last_calls": strategy._hook_states.last_calls(strategy.registry),
    }


def _load_run(strategy: TrainingStrategy, run: Mapping[str, Any]) -> None:
    for name in _COUNTERS:
        setattr(strategy, name, run["counters"][name])
    under_way = run["began_at"] is not None and run["unit"] == _unit(strategy)
    strategy._goal = run["began_at"] + _length(strategy) if under_way else None
    strategy._validated_at = run["validated_at"]
    saved = run["validation"]
    strategy.validation_result = saved and ValidationResult(
        saved["losses"], weights=saved["weights"], batches=saved["batches"]
    )
    strategy._hook_states.set_last_calls(strategy.registry, run["last_calls"])


def _unit(strategy: TrainingStrategy) -> str:
    return "steps" if strategy.num_steps else "epochs"


def _length(strategy: TrainingStrategy) -> int:
    return strategy.num_steps or strategy.num_epochs or 0
