"""What the state of a run must hold, checked before any of it is taken over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvalchemi.errors import CheckpointMismatchError
from nvalchemi.training.rng import check_rng
from nvalchemi.training.shape import Each, misfit

__all__ = ["COUNTERS", "check_shape", "check_state"]

COUNTERS = ("step_count", "global_step_count", "batch_count", "epoch_step_count", "epoch")
_PARTS = ("models", "optimizers", "schedulers", "hooks", "run", "position")
_RUN = {
    "counters": dict.fromkeys(COUNTERS, int),
    "is_set_up": bool,
    "unit": str,
    "began_at": (int, None),
    "validated_at": (int, None),
    "validation": ({"losses": Each((float, int)), "weights": str, "batches": int}, None),
    "last_calls": Each(Each(int)),
}
_PLACE = {"rng": Each(object), "loader": Each(object)}
_POSITION = {
    "in_pass": bool,
    "ended": bool,
    "stepped": bool,
    "steps_before": int,
    "start": (_PLACE, None),
    "validation": Each(object),
    "now": {**_PLACE, "running": bool},
}


def check_state(state: Mapping[str, Any]) -> None:
    """Refuse a state that lacks something, or whose run, position or random numbers are not what a run saves.

    Models, optimizers and schedulers are only looked for: each is large and is checked where it is read.

    Raises
    ------
    CheckpointMismatchError
        A ``ValueError`` with the place, the value and the remedy.
    """
    check_shape(state, {}, "state")
    check_shape(dict.fromkeys(state), dict.fromkeys(_PARTS, object), "state")  # so that no large part is read
    check_shape(state["hooks"], Each({}), "hooks")
    check_shape(state["run"], _RUN, "run")
    position = state["position"]
    check_shape(position, _POSITION, "position")
    check_shape(position.get("ahead"), (_PLACE, None), "position['ahead']")  # states of 0.1 have none
    for name in ("start", "now", "ahead"):
        if position.get(name) is not None:
            check_rng(position[name]["rng"], f"position[{name!r}]['rng']")


def check_shape(value: Any, shape: Any, where: str) -> None:
    """Refuse a part of a state that has not the shape it is saved in; see `misfit`."""
    if wrong := misfit(value, shape, where):
        raise CheckpointMismatchError(
            f"The state is not what a run saves: {wrong}; give what state_dict() or save_training made of a run."
        )
