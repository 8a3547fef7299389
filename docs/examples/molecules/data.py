"""Read trajectories, and hold out the end of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from graphs import CUTOFF, Frame, Pairs, free_pairs, make_frame
from torch import Tensor

EMBEDDED = Path(__file__).parent / "data" / "molecules.npz"

HELD_OUT, VALIDATION, GAP = 0.2, 0.05, 0.01
"""Shares of a trajectory: its last stretch, the stretch for the learning curve before it, and the gaps between."""

SHORTEST = 10
"""A trajectory of fewer frames is not split: all of it goes to training."""


class DataError(ValueError):
    """A file that cannot be trained on; the message says which file, which frame, and what is wrong."""


class Trajectory(NamedTuple):
    """Frames of one system, in the order in which they were sampled."""

    name: str
    frames: list[Frame]


class Split(NamedTuple):
    """Frames for training, for the learning curve, and for the final table."""

    training: list[Frame]
    validation: list[Frame]
    held_out: list[Frame]


def load(files: Sequence[Path] = ()) -> list[Trajectory]:
    """Read extended-XYZ files, or the embedded trajectories when none is given."""
    if not files:
        return read_embedded(EMBEDDED)
    return [trajectory for file in files for trajectory in read_xyz(file)]


def read_embedded(file: Path) -> list[Trajectory]:
    """Read what ``make_data.py`` wrote: the numbers, positions, energies and forces of each molecule."""
    trajectories = []
    with np.load(file) as arrays:
        for name in (key.removesuffix(".numbers") for key in arrays if key.endswith(".numbers")):
            labelled = zip(*(arrays[f"{name}.{part}"] for part in ("positions", "energies", "forces")), strict=True)
            numbers = arrays[f"{name}.numbers"]
            frames = [make_frame(numbers, x, energy, f, free_pairs(x)) for x, energy, f in labelled]
            trajectories.append(Trajectory(name, frames))
    return trajectories


def read_xyz(file: Path) -> list[Trajectory]:
    """Read an extended-XYZ file through ASE.

    Frames with the same atoms in the same order (and the same ``config_type``, where there is one) are a trajectory.

    Raises
    ------
    DataError
        If the file does not exist or cannot be parsed, or if a frame has no energy or no forces, or not finite ones.
    """
    try:
        import ase.io
    except ImportError as missing:
        raise DataError(f"{file}: reading extended XYZ needs ASE; install it with: pip install ase") from missing
    if file.is_dir():
        raise DataError(f"{file} is a folder; name the files in it, with commas between")
    if not file.is_file():
        raise DataError(f"{file}: there is no such file")
    try:
        images = ase.io.read(file, index=":", format="extxyz")
    except (ValueError, KeyError, IndexError, OSError) as cause:  # what ASE's parser raises on other text
        raise DataError(f"{file}: not an extended-XYZ file that ASE can read ({cause})") from cause
    if not images:
        raise DataError(f"{file}: there is no frame in it")
    found: dict[tuple[Any, ...], list[Frame]] = {}
    for index, atoms in enumerate(images):
        name = f"{atoms.get_chemical_formula()} {atoms.info.get('config_type', '')}".strip()
        frame = _xyz_frame(atoms, f"{file}, frame {index} (the first is 0)")
        found.setdefault((name, *atoms.numbers.tolist()), []).append(frame)
    return [Trajectory(key[0], frames) for key, frames in found.items()]


def _xyz_frame(atoms: Any, where: str) -> Frame:
    """Check and convert one ``ase.Atoms``; ASE puts the energy and forces it recognises into a calculator."""
    results = atoms.calc.results if atoms.calc is not None else {}
    missing = [label for label in ("energy", "forces") if label not in results]
    if missing:
        has = sorted({*atoms.info, *atoms.arrays, *results} - {"numbers", "positions"})
        raise DataError(
            f"{where}: no {' and no '.join(missing)} (beside positions it has: {', '.join(has) or 'nothing'}); "
            "write energy=... (eV) in the comment line, and forces as a column forces:R:3 (eV/Å)"
        )
    energy, forces = results["energy"], results["forces"]
    if not (np.isfinite(energy) and np.isfinite(forces).all() and np.isfinite(atoms.positions).all()):
        raise DataError(f"{where}: energy, forces or positions hold inf or nan; leave the frame out")
    return make_frame(atoms.numbers, atoms.positions, energy, forces, _pairs(atoms))


def _pairs(atoms: Any) -> Pairs:
    if not atoms.pbc.any():
        return free_pairs(atoms.positions)
    from ase.neighborlist import neighbor_list

    i, j, images = neighbor_list("ijS", atoms, CUTOFF)
    return i, j, images @ atoms.cell.array


def split(trajectories: Iterable[Trajectory]) -> Split:
    """Cut each trajectory in time: training, gap, validation, gap, and the last stretch held out.

    Neighbouring frames of a trajectory resemble each other, so a random choice would test what was learnt by heart.

    Raises
    ------
    DataError
        If no trajectory has ``SHORTEST`` frames, so that nothing could be held out.
    """
    parts = Split([], [], [])
    for _, frames in trajectories:
        if len(frames) < SHORTEST:
            parts.training.extend(frames)
            continue
        gap, validation, held_out = (max(1, round(share * len(frames))) for share in (GAP, VALIDATION, HELD_OUT))
        test = len(frames) - held_out
        middle = test - gap - validation
        parts.training.extend(frames[: middle - gap])
        parts.validation.extend(frames[middle : middle + validation])
        parts.held_out.extend(frames[test:])
    if not parts.held_out:
        raise DataError(
            f"no trajectory has the {SHORTEST} frames that it takes to hold some out; "
            f"there are {len(parts.training)} frames in all"
        )
    return parts


def fit_reference(frames: Sequence[Frame]) -> Tensor:
    """Fit an energy a chemical element (eV, float64 [119], by atomic number) to total energies by least squares."""
    counts = torch.stack([torch.bincount(frame.numbers, minlength=119) for frame in frames]).double()
    energies = torch.tensor([frame.energy for frame in frames], dtype=torch.float64)
    return torch.linalg.lstsq(counts, energies, driver="gelsd").solution


def composition_means(frames: Sequence[Frame]) -> dict[tuple[int, ...], float]:
    """Average the total energy over the frames of each composition: the trivial prediction."""
    groups: dict[tuple[int, ...], list[float]] = {}
    for frame in frames:
        groups.setdefault(frame.composition, []).append(frame.energy)
    return {composition: float(np.mean(energies)) for composition, energies in groups.items()}
