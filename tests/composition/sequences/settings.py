"""What is drawn for a sequence: the hooks and optimizers of a run, and what happens in each of its batches."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from nvalchemi.training import TrainingStage

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
OPTIONAL = ("ema", "clip", "scaling", "veto")  # hooks that a run may gain or lose when it is loaded


@dataclass(frozen=True)
class Settings:
    """A run: one optimizer for both parameters or one for each, and hooks, each of which may be absent."""

    optimizer: str = "sgd"
    fused: bool = False
    split: bool = False
    dtype: str = "float32"
    lazy: bool = False
    ema: tuple[float, int, int] = (0.5, 1, 0)  # decay, update_every, start_step
    clip: str = "norm"
    scaling: str = "dynamic"
    limit: int | None = None  # of the veto hook
    probe_priority: int = 60
    probe_reads: bool = False
    probe_defers: bool = True
    accumulates: str = "told"  # "no", "told" by the batch, or "counted" by the official hook
    hooks: frozenset[str] = frozenset(OPTIONAL)

    @property
    def owners(self) -> tuple[tuple[str, ...], ...]:
        """The parameters of each optimizer."""
        return (("w",), ("b",)) if self.split else (("w", "b"),)

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled."""
        return "scaling" in self.hooks and self.scaling != "bf16"

    @property
    def guarded(self) -> bool:
        """Whether anybody sees to it that no optimizer steps on an inf."""
        return self.scales or bool({"accum", "clip", "veto"} & self.hooks)

    def with_hooks(self, hooks: frozenset[str], **changes: object) -> Settings:
        """Return the same run with other hooks."""
        return dataclasses.replace(self, hooks=hooks, **changes)


@dataclass(frozen=True)
class Step:
    """One batch: the gradients of both parameters, and what hooks do meanwhile."""

    w: tuple[float, float] = (1.0, -2.0)
    b: float | None = 0.5  # None: the loss does not reach it
    veto: str = ""  # one of VETOES
    fault: tuple[str, object] | None = None  # ("plain", stage), ("update", method) or ("code", function)
    open: bool = False  # the window goes on
    save: TrainingStage | None = None
    looks: bool = False  # a plain hook reads what became of the step, as a logger would

    @property
    def gradients(self) -> dict[str, list[float] | None]:
        """By parameter."""
        return {"w": list(self.w), "b": None if self.b is None else [self.b]}

    def innocent(self) -> Step:
        """Return the same batch without faults and saves."""
        return dataclasses.replace(self, fault=None, save=None)


_STAGES = [
    TrainingStage.BEFORE_BATCH, TrainingStage.BEFORE_FORWARD, TrainingStage.AFTER_FORWARD, TrainingStage.BEFORE_LOSS,
    TrainingStage.AFTER_LOSS, TrainingStage.BEFORE_BACKWARD, TrainingStage.AFTER_BACKWARD,
    TrainingStage.BEFORE_OPTIMIZER_STEP, TrainingStage.AFTER_OPTIMIZER_STEP, TrainingStage.AFTER_BATCH,
]  # fmt: skip
METHODS = ("before_batch", "transform_loss", "before_optimizer_step", "after_optimizer_step", "settled")
_FAULTS = [
    *(("plain", stage) for stage in _STAGES), *(("update", method) for method in METHODS * 2), ("code", "forward"),
    ("code", "loss"),
]  # fmt: skip
_SMALL = st.sampled_from([-2.0, -1.0, -0.5, 0.0, 0.25, 0.5, 1.0, 3.0])
_LARGE = st.sampled_from([float("inf"), float("-inf"), float("nan")])


def settings() -> st.SearchStrategy[Settings]:
    """Return all runs that can be composed."""
    return st.builds(
        Settings,
        optimizer=st.sampled_from(["sgd", "momentum", "adam", "adamw"]),
        fused=st.booleans(),
        split=st.booleans(),
        dtype=st.sampled_from(["float32", "float32", "float64", "bfloat16"]),
        lazy=st.booleans(),
        ema=st.tuples(st.sampled_from([0.5, 0.9]), st.integers(1, 2), st.sampled_from([0, 0, 3])),
        clip=st.sampled_from(["norm", "value", "per_optimizer"]),
        scaling=st.sampled_from(["dynamic", "static", "fp16", "bf16"]),
        limit=st.sampled_from([None, 2]),
        probe_priority=st.sampled_from([15, 35, 60]),
        probe_reads=st.booleans(),
        probe_defers=st.booleans(),
        accumulates=st.sampled_from(["no", "told", "counted"]),
        hooks=st.frozensets(st.sampled_from(OPTIONAL), min_size=1),
    ).map(_composable)


def _composable(drawn: Settings) -> Settings:
    """Return what fits together: autocast wants parameters in float32."""
    if drawn.accumulates == "counted":
        drawn = dataclasses.replace(drawn, hooks=drawn.hooks | {"accum"})
    return (
        drawn
        if drawn.dtype == "float32" or drawn.scaling in ("dynamic", "static")
        else dataclasses.replace(drawn, scaling="dynamic")
    )


def steps(*, faults: bool = True, windows: bool = True) -> st.SearchStrategy[Step]:
    """Return all batches."""
    some = st.sampled_from([None] * (2 * len(_FAULTS)) + _FAULTS)  # a third
    return st.builds(
        _step,
        w=st.tuples(_SMALL, _SMALL),
        b=st.one_of(_SMALL, _SMALL, st.none()),
        poison=st.one_of(st.none(), st.none(), st.none(), st.tuples(st.sampled_from("wb"), _LARGE)),
        veto=st.sampled_from(["", "", "", "eager", "deferred", "deferred inf", "deferred no"]),
        fault=some if faults else st.none(),
        open=st.booleans() if windows else st.just(False),
        looks=st.booleans(),
    )


def _step(*, poison: tuple[str, float] | None, **fields: object) -> Step:
    step = Step(**fields)
    if poison is None:
        return step
    where, value = poison
    return dataclasses.replace(step, **({"w": (step.w[0], value)} if where == "w" else {"b": value}))
