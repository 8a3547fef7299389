"""Train a small interatomic potential on energies and forces from quantum chemistry, with hooks that are found by name.

Without arguments it learns ethanol, acetone and acetamide at 500 K from GFN2-xTB (data/README.md) on one processor
core, with every official hook that is installed. Then it compares the live and the averaged weights, on configurations
from the end of each trajectory, with a prediction that costs nothing: the mean energy of the composition, no forces.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from data import Split, fit_reference, load, split
from evaluate import averaged_model, errors_of, predict, trivial
from graphs import Batch, batches
from keep import export, go_on, saving
from model import Potential, Prediction
from report import Recorder, Report, SignOfLife, check_picture, plot
from rich.console import Console
from torch import Tensor

import nvalchemi
from nvalchemi.hooks import HookState, list_hooks
from nvalchemi.training import OptimizerConfig, TrainingStrategy, Validation

EPOCHS, BATCH_SIZE, LEARNING_RATE, WARM_UP = 30, 16, 1e-2, 120
SETTINGS: dict[str, dict[str, Any]] = {
    "mixed_precision": {},  # --precision
    "scaler_veto": {},
    "grad_clip": {"max_norm": 0.5},
    "ema": {"decay": 0.99},
}
"""The hooks that are active unless --hooks says otherwise, as far as they are installed, and what they are told."""

EXAMPLES = """\
examples:
  python train.py                              the whole run, on the embedded data
  python train.py --steps 200 --json out.json  a short one, with its figures in a file
  python train.py --hooks ema                  one hook alone; all that can be named: nvalchemi hooks list
  python train.py --precision fp16             half precision: the loss is scaled, and some first steps are vetoed
  python train.py --checkpoint run              save it every epoch; if it is stopped: add --resume, and it goes on
  python train.py --export weights.pt          final weights, live and averaged: torch.load(..., weights_only=True)
  python train.py --data my.xyz --epochs 100   your own trajectory (extended XYZ: energy in eV, forces in eV/Å)

figures of --json: errors are mean absolute errors, energies in meV/atom, forces in meV/Å for each component.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Read, train, evaluate, report."""
    parser = command_line()
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    console = Console()
    try:
        for file in filter(None, (options.json, options.plot, options.export)):
            refuse_missing_folder(file)
        if options.resume and options.checkpoint is None:
            raise ValueError("--resume goes on from the checkpoints of a folder; name it: --checkpoint DIR")
        check_picture(options.plot)
        trajectories = load(options.data)
        parts = split(trajectories)
        hooks = chosen_hooks(options.hooks, options.precision, options.accumulate)
        recorder = Recorder(identity(options, parts))
        loader = batches(parts.training, BATCH_SIZE, shuffle=True)
        watching: list[Any] = [recorder]
        if not sys.stderr.isatty():  # a terminal has a progress bar
            watching.append(SignOfLife(console, length_of(options, loader), "steps" if options.steps else "batches"))
        if options.checkpoint is not None:
            watching.append(saving(options.checkpoint, resume=options.resume))  # the last: it saves what the others did
        strategy = build_strategy(parts, loader, [*hooks, *watching], options)
        if options.resume:
            go_on(strategy, options.checkpoint, console)
    except (ValueError, LookupError, ImportError, OSError) as refusal:  # data, hooks, device, files: all say why
        parser.exit(2, f"{parser.prog}: {refusal}\n")
    console.print(
        f"{', '.join(trajectory.name for trajectory in trajectories)}: {len(parts.training)} configurations to train "
        f"on, {len(parts.validation)} for the learning curve, {len(parts.held_out)} held out; "
        f"hooks: {', '.join(name for hook in hooks for name in hook) or 'none'}",
        soft_wrap=True,
        highlight=False,
    )

    start = time.perf_counter()
    strategy.run(loader)
    predictions = {"live": predict(strategy, strategy.models["main"], parts.held_out)}
    if (averaged := averaged_model(strategy)) is not None:
        predictions["averaged"] = predict(strategy, averaged, parts.held_out)
    errors = {weights: errors_of(prediction, parts.held_out) for weights, prediction in predictions.items()}
    report = Report(
        baseline=errors_of(trivial(parts), parts.held_out),
        live=errors["live"],
        averaged=errors.get("averaged"),
        steps=strategy.step_count,
        vetoed=recorder.vetoed,
        clipped=sum(getattr(hook, "clipped_steps", 0) for hook in strategy.orchestrator.iter_hooks()),
        seconds=time.perf_counter() - start,
        settings=settings_of(options, hooks),
    )
    console.print(report.table())
    if options.export:
        export(options.export, strategy)
        console.print(f"weights written to {options.export.resolve()}", soft_wrap=True, highlight=False)
    if options.json:
        report.write(options.json)
        console.print(f"figures written to {options.json.resolve()}", soft_wrap=True, highlight=False)
    try:
        plot(options.plot, recorder, report.baseline, predictions, parts.held_out)
        console.print(f"picture written to {options.plot.resolve()}", soft_wrap=True, highlight=False)
    except ImportError as missing:
        console.print(f"no picture: {missing}; pip install matplotlib", highlight=False)


def build_strategy(parts: Split, loader: Any, hooks: list[Any], options: Any) -> TrainingStrategy:
    """Put model, optimizer, schedule, loss and hooks together."""
    unit = torch.cat([frame.forces for frame in parts.training]).square().mean().sqrt().item()

    def loss_fn(predictions: Prediction, batch: Batch) -> dict[str, Tensor]:
        energy = (predictions.energy - batch.energy) / batch.sizes
        forces = predictions.forces - batch.forces
        return {
            "loss": (forces / unit).square().mean() + 2 * (energy / unit).square().mean().float(),
            "energy_mae": energy.detach().abs().mean(),
            "force_mae": forces.detach().abs().mean(),
        }

    return TrainingStrategy(
        models=Potential(fit_reference(parts.training), scale=unit),
        optimizer_configs=OptimizerConfig(
            optimizer_cls=torch.optim.AdamW,
            optimizer_kwargs={"lr": LEARNING_RATE, "weight_decay": 1e-4, "fused": True},
            scheduler_cls=torch.optim.lr_scheduler.LambdaLR,
            scheduler_kwargs={"lr_lambda": rise_and_fall},
        ),
        loss_fn=loss_fn,
        num_steps=options.steps,
        num_epochs=None if options.steps else options.epochs,
        hooks=hooks,
        devices=options.device,
        validation=Validation(
            loader=list(batches(parts.validation)),
            every_steps=max(1, length_of(options, loader) // (40 * (1 if options.steps else options.accumulate))),
        ),
    )


def rise_and_fall(step: int) -> float:
    """Return the learning rate's factor: a linear warm-up, then a fall with the square root of the steps.

    Nothing in it depends on the length of the run, so a run can be stopped and made longer. After the 2880 steps of the
    default run it is at a fifth: what noise is left in the live weights then, an average takes away.

    References
    ----------
    Vaswani et al., "Attention is all you need", NeurIPS 2017, equation 3.
    """
    return min((step + 1) / WARM_UP, (WARM_UP / (step + 1)) ** 0.5)


def chosen_hooks(names: str | None, precision: str, accumulate: int = 1) -> list[dict[str, dict[str, Any]]]:
    """Name the hooks of this run with their arguments, as ``TrainingStrategy(hooks=...)`` takes them.

    Raises
    ------
    LookupError
        The precision is not fp32, and the hook that provides it is not among them.
    """
    installed = {hook.name for hook in list_hooks() if hook.state is HookState.AVAILABLE}
    chosen = [name for name in SETTINGS if name in installed] if names is None else names.split(",")
    chosen = [name.strip() for name in chosen if name.strip()]
    settings = SETTINGS | {"mixed_precision": {"precision": precision}}
    if precision != "fp32" and "mixed_precision" not in chosen:
        raise LookupError(
            f"--precision {precision} needs the hook mixed_precision, which is not active; "
            "add it to --hooks, or install it: pip install 'nvalchemi-hooks[loss-scaling]'"
        )
    gathering = [{"grad_accum": {"steps": accumulate, "weight": "sizes"}}] if accumulate > 1 else []  # sizes: atoms
    return gathering + [{name: settings.get(name, {})} for name in chosen]


def length_of(options: Any, loader: Any) -> int:
    """Count the steps that were asked for, were none of them vetoed, or else the batches."""
    return options.steps or options.epochs * len(loader)


def settings_of(options: Any, hooks: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Say what this run was told, for whoever finds its figures."""
    return {
        "seed": options.seed,
        "precision": options.precision,
        "hooks": {name: told for hook in hooks for name, told in hook.items()},
        "data": [str(file) for file in options.data] or "embedded",
        "nvalchemi-hooks": nvalchemi.__version__,
    }


def identity(options: Any, parts: Split) -> dict[str, str | int]:
    """Say what a run has to have in common with the one it goes on from."""
    energies = [frame.energy for frame in parts.training]
    data = f"{len(energies)} configurations of {sum(energies):.3f} eV in all"
    return {"--seed": options.seed, "--precision": options.precision, "the training data": data}


def refuse_missing_folder(file: Path) -> None:
    """Find out before the training, not after it, that a result could not be written."""
    if not file.resolve().parent.is_dir():
        raise FileNotFoundError(f"{file} cannot be written: there is no folder {file.resolve().parent}")


def command_line() -> argparse.ArgumentParser:
    """Describe the flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=positive, metavar="N", help="train for N executed optimizer steps")
    length.add_argument(
        "--epochs",
        type=positive,
        default=EPOCHS,
        metavar="N",
        help="or for N passes over the data (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all random numbers (default: %(default)s)")
    parser.add_argument(
        "--hooks", metavar="NAME,...", help=f"default: {','.join(SETTINGS)} as far as installed; '' is none"
    )
    parser.add_argument(
        "--accumulate",
        type=positive,
        default=1,
        metavar="N",
        help="take one step for N batches, by the atoms they hold (default: %(default)s)",
    )
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="of the forward (default: %(default)s)",
    )
    parser.add_argument(
        "--data", type=files, default=(), metavar="FILE,...", help="extended XYZ, in place of the embedded trajectories"
    )
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="save every epoch and the end here, the last three are kept"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the latest in --checkpoint; from the beginning if it is empty"
    )
    parser.add_argument("--export", type=Path, metavar="FILE", help="write the final weights here, live and averaged")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument(
        "--plot",
        type=Path,
        default=Path("molecules.png"),
        metavar="FILE",
        help="picture (default: %(default)s)",
    )
    parser.add_argument("--threads", type=positive, default=1, metavar="N", help="of torch (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="where to train (default: %(default)s)")
    return parser


def positive(text: str) -> int:
    """Read a number of 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def files(text: str) -> tuple[Path, ...]:
    """Read one path, or several with commas between."""
    return tuple(Path(part) for part in ([text] if Path(text).exists() else text.split(",")) if part)


if __name__ == "__main__":
    main()
