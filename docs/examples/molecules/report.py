"""What came of a training: a table for a person, figures as JSON, and a picture."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from data import composition_means
from evaluate import Errors
from graphs import Frame, collate
from model import Prediction
from rich.console import Console
from rich.table import Table
from torch import Tensor

from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage, ValidationResult


class Recorder:
    """A plain hook that keeps the learning curves and counts the steps that were not taken, over a stop and a resume.

    Parameters
    ----------
    run : mapping of str to str or int, optional
        What makes the run the run it is; a checkpoint of another one is refused.
    """

    frequency = 1
    stage = None

    def __init__(self, run: Mapping[str, str | int] | None = None) -> None:
        self.run = dict(run or {})
        self.training: list[Tensor] = []  # the force error of each batch; read at the end, so no device has to wait
        self.validation: list[tuple[int, float]] = []
        self.validated = "live"
        self.vetoed = 0

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        return stage in (TrainingStage.AFTER_BATCH, TrainingStage.AFTER_VALIDATION)

    def __call__(self, ctx: TrainContext, stage: TrainingStage) -> None:
        """Note what has just happened."""
        if stage is TrainingStage.AFTER_BATCH:
            self.training.append(ctx.losses["force_mae"])
            self.vetoed += ctx.step_skipped and ctx.window_complete
        elif isinstance(ctx.validation, ValidationResult):
            self.validation.append((ctx.batch_count, ctx.validation["force_mae"]))
            self.validated = ctx.validation.weights

    def state_dict(self) -> dict[str, Any]:
        """Return curves and counts, for a checkpoint."""
        training = torch.stack(self.training).cpu() if self.training else torch.zeros(0)
        kept = {"validation": list(self.validation), "validated": self.validated, "vetoed": self.vetoed}
        return {"run": dict(self.run), "training": training, **kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the curves of a checkpoint.

        Raises
        ------
        ValueError
            It is that of another run.
        """
        for name, value in self.run.items():
            if state["run"].get(name) != value:
                raise ValueError(
                    f"{name} is {value}, but {state['run'].get(name)} in the run of the checkpoint; "
                    "go on with what it began with, or begin anew in another folder"
                )
        self.training = list(state["training"].unbind())
        self.validation = [tuple(point) for point in state["validation"]]
        self.validated, self.vetoed = state["validated"], state["vetoed"]


class SignOfLife:
    """A plain hook that prints a line after every tenth of a run, for a log where nobody sees a progress bar."""

    frequency = 1
    stage = TrainingStage.AFTER_BATCH

    def __init__(self, console: Console, total: int, unit: Literal["steps", "batches"]) -> None:
        self.console, self.total, self.unit = console, total, unit
        self.start = time.perf_counter()
        self.tenths = 0

    def __call__(self, ctx: TrainContext, stage: TrainingStage) -> None:
        """Print if another tenth is over."""
        done = ctx.step_count if self.unit == "steps" else ctx.batch_count
        if (tenths := 10 * done // self.total) > self.tenths:
            self.tenths = tenths
            self.console.print(
                f"{done} of {self.total} {self.unit} in {time.perf_counter() - self.start:.0f} s, "
                f"force error of the latest batch {1e3 * ctx.losses['force_mae'].item():.1f} meV/Å",
                soft_wrap=True,
                highlight=False,
            )


@dataclass(frozen=True)
class Report:
    """The figures of a run; None where no averaged weights were kept."""

    baseline: Errors
    live: Errors
    averaged: Errors | None
    steps: int
    vetoed: int
    clipped: int
    seconds: float
    settings: Mapping[str, Any]

    def table(self) -> Table:
        """Lay them out for a person."""
        table = Table(
            title="mean absolute errors on held-out configurations",
            caption=f"{self.steps} steps taken, {self.vetoed} vetoed, {self.clipped} clipped, in {self.seconds:.0f} s",
        )
        table.add_column("weights")
        for heading in ("energy, meV/atom", "better by", "forces, meV/Å", "better by"):
            table.add_column(heading, justify="right")
        for name, errors in (("trivial", self.baseline), ("live", self.live), ("averaged", self.averaged)):
            if errors is None:
                table.add_row(name, *("not kept",) * 4)
            else:
                energy, forces = (f"{base / own:.1f} x" for base, own in zip(self.baseline, errors, strict=True))
                table.add_row(name, f"{errors.energy_mae:.2f}", energy, f"{errors.force_mae:.1f}", forces)
        return table

    def write(self, file: Path) -> None:
        """Write them as JSON, with their units."""
        figures = {key: value._asdict() if isinstance(value, Errors) else value for key, value in vars(self).items()}
        figures["units"] = {"energy_mae": "meV/atom", "force_mae": "meV/Å"}
        file.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_picture(file: Path) -> None:
    """Find out before the training whether matplotlib can write such a file; without matplotlib there will be none.

    Raises
    ------
    ValueError
        It cannot.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    kinds = sorted(Figure().canvas.get_supported_filetypes())
    if file.suffix.removeprefix(".").lower() not in kinds:
        raise ValueError(f"{file} is no picture that matplotlib can write; its suffix may be .{', .'.join(kinds)}")


def plot(
    file: Path, recorder: Recorder, baseline: Errors, predictions: Mapping[str, Prediction], frames: Sequence[Frame]
) -> None:
    """Draw the learning curves, and the last of the predictions against the labels.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    weights, prediction = list(predictions.items())[-1]
    true, means = collate(frames), composition_means(frames)
    level = torch.tensor([means[frame.composition] for frame in frames], dtype=torch.float64)
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    curves, forces, energies = figure.subplots(1, 3)
    _draw_curves(curves, recorder, baseline)
    _draw_parity(forces, true.forces.flatten(), prediction.forces.flatten(), "force component, eV/Å")
    _draw_parity(
        energies, true.energy - level, prediction.energy - level, "energy, eV from the mean of the composition"
    )
    for axes in (forces, energies):
        axes.set_title(f"held-out configurations, {weights} weights")
    figure.savefig(file, dpi=110)


def _draw_curves(axes: Any, recorder: Recorder, baseline: Errors) -> None:
    from matplotlib.ticker import LogLocator

    training = 1e3 * torch.stack(recorder.training).cpu()
    axes.plot(range(1, len(training) + 1), training, color="tab:gray", linewidth=0.5, alpha=0.6, label="training batch")
    if recorder.validation:
        batches, errors = zip(*recorder.validation, strict=True)
        label = f"validation, {recorder.validated} weights"
        axes.plot(batches, [1e3 * error for error in errors], "o-", markersize=3, label=label)
    axes.axhline(baseline.force_mae, color="black", linestyle="--", label="no forces at all")
    axes.set(xlabel="batch", ylabel="mean absolute force error, meV/Å", yscale="log", title="learning curves")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.legend(loc="upper right", bbox_to_anchor=(1.0, 0.93))


def _draw_parity(axes: Any, true: Tensor, predicted: Tensor, quantity: str) -> None:
    ends = [float(true.min()), float(true.max())]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.plot(true, predicted, ".", markersize=2, alpha=0.4)
    axes.set(xlabel=quantity, ylabel="predicted", aspect="equal")
