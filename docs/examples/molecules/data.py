"""Read configurations, hold out the end of each trajectory, and make batches of molecular graphs.

Units everywhere: Å for lengths, eV for energies, eV/Å for forces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

EMBEDDED = Path(__file__).parent / "data" / "molecules.npz"
CUTOFF = 5.0
"""Atoms further apart than this (Å) do not see each other."""

HELD_OUT, VALIDATION, GAP = 0.2, 0.05, 0.01
"""Shares of a trajectory: its last stretch, the stretch for the learning curve before it, and each gap between."""

SHORTEST = 10
"""A trajectory of fewer frames is not split: all of it goes to training."""


class DataError(ValueError):
    """A file that cannot be trained on; the message says which file, which frame, and what is wrong."""


@dataclass(frozen=True)
class Frame:
    """One configuration of ``n`` atoms with its labels and the ``k`` neighbours of each atom."""

    numbers: Tensor
    """int64 [n], atomic numbers."""
    positions: Tensor
    """float32 [n, 3], Å."""
    energy: float
    """Total energy, eV."""
    forces: Tensor
    """float32 [n, 3], eV/Å."""
    neighbours: Tensor
    """int64 [n, k]: the atoms nearer than the cutoff; where an atom has fewer than k, itself."""
    shifts: Tensor
    """float32 [n, k, 3], Å: the periodic image of the neighbour; the cutoff itself where there is none."""

    @property
    def composition(self) -> tuple[int, ...]:
        """The atomic numbers in sorted order, which name the composition."""
        return tuple(sorted(self.numbers.tolist()))


class Trajectory(NamedTuple):
    """Frames of one system, in the order in which they were sampled."""

    name: str
    frames: list[Frame]


@dataclass(frozen=True)
class Batch:
    """Several frames as one graph that has no edges between them."""

    numbers: Tensor
    positions: Tensor
    neighbours: Tensor
    shifts: Tensor
    owner: Tensor
    """int64 [atoms]: the frame to which an atom belongs."""
    sizes: Tensor
    """float32 [frames]: atoms a frame."""
    energy: Tensor
    """float64 [frames], eV: total energies are large, and what is learnt of them is small."""
    forces: Tensor

    def to(self, device: torch.device | str) -> Batch:
        """Copy every tensor to ``device``."""
        return Batch(*(getattr(self, field.name).to(device) for field in fields(self)))


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
    """Read what ``make_data.py`` wrote: per molecule numbers, positions, energies and forces."""
    with np.load(file) as arrays:
        names = [key.removesuffix(".numbers") for key in arrays if key.endswith(".numbers")]
        return [Trajectory(name, _free_frames(*(arrays[f"{name}.{part}"] for part in _PARTS))) for name in names]


_PARTS = ("numbers", "positions", "energies", "forces")


def _free_frames(numbers: np.ndarray, positions: np.ndarray, energies: np.ndarray, forces: np.ndarray) -> list[Frame]:
    """Make frames of one molecule in empty space."""
    z = torch.from_numpy(numbers.astype(np.int64))
    frames = []
    for x, energy, f in zip(positions, energies, forces, strict=True):
        i, j = _free_pairs(x)
        frames.append(Frame(z, torch.from_numpy(x), float(energy), torch.from_numpy(f), *_table(i, j, len(z))))
    return frames


def _free_pairs(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """List who is near whom in empty space, in the order of the first."""
    distances = np.linalg.norm(positions[:, None] - positions[None], axis=-1)
    np.fill_diagonal(distances, np.inf)
    i, j = np.nonzero(distances < CUTOFF)
    return i, j


def _table(i: np.ndarray, j: np.ndarray, atoms: int, shifts: np.ndarray | float = 0.0) -> tuple[Tensor, Tensor]:
    """Turn sorted pairs into a row of neighbours for each atom, filled up with the atom itself one cutoff away."""
    counts = np.bincount(i, minlength=atoms)
    column = np.arange(len(i)) - np.repeat(counts.cumsum() - counts, counts)
    neighbours, away = _nobody(atoms, int(counts.max(initial=0)))
    neighbours[i, column] = torch.from_numpy(j)
    away[i, column] = torch.as_tensor(shifts, dtype=away.dtype)
    return neighbours, away


def _nobody(atoms: int, width: int) -> tuple[Tensor, Tensor]:
    """Build a table in which every neighbour is the atom itself one cutoff away, where the potential vanishes."""
    neighbours = torch.arange(atoms)[:, None].repeat(1, width)
    return neighbours, torch.tensor([CUTOFF, 0.0, 0.0]).repeat(atoms, width, 1)


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
    if not file.is_file():
        raise DataError(f"{file}: there is no such file")
    try:
        images = ase.io.read(file, index=":", format="extxyz")
    except (ValueError, KeyError, IndexError, OSError) as cause:  # what ASE's parser raises on malformed text
        raise DataError(f"{file}: not an extended-XYZ file that ASE can read ({cause})") from cause
    if not images:
        raise DataError(f"{file}: there is no frame in it")
    found: dict[tuple[Any, ...], list[Frame]] = {}
    for index, atoms in enumerate(images):
        name = f"{atoms.get_chemical_formula()} {atoms.info.get('config_type', '')}".strip()
        key = (name, *atoms.numbers.tolist())
        found.setdefault(key, []).append(_xyz_frame(atoms, f"{file}, frame {index}"))
    return [Trajectory(key[0], frames) for key, frames in found.items()]


def _xyz_frame(atoms: Any, where: str) -> Frame:
    """Check and convert one ``ase.Atoms``; ASE puts the energy and forces it recognises into a calculator."""
    from ase.neighborlist import neighbor_list

    results = atoms.calc.results if atoms.calc is not None else {}
    missing = [label for label in ("energy", "forces") if label not in results]
    if missing:
        has = sorted({*atoms.info, *atoms.arrays, *results} - {"numbers", "positions"})
        raise DataError(
            f"{where}: no {' and no '.join(missing)} (what it has: {', '.join(has) or 'positions alone'}); "
            "write energy=... (eV) in the comment line and a column forces:R:3 (eV/Å)"
        )
    energy, forces = float(results["energy"]), np.asarray(results["forces"])
    if not (np.isfinite(energy) and np.isfinite(forces).all() and np.isfinite(atoms.positions).all()):
        raise DataError(f"{where}: energy, forces or positions hold inf or nan; remove the frame")
    if atoms.pbc.any():
        i, j, images = neighbor_list("ijS", atoms, CUTOFF)
        table = _table(i, j, len(atoms), images @ atoms.cell.array)
    else:
        table = _table(*_free_pairs(atoms.positions), len(atoms))
    return Frame(
        torch.from_numpy(atoms.numbers.astype(np.int64)),
        torch.from_numpy(atoms.positions.astype(np.float32)),
        energy,
        torch.from_numpy(forces.astype(np.float32)),
        *table,
    )


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
        gap = max(1, round(GAP * len(frames)))
        test = len(frames) - max(1, round(HELD_OUT * len(frames)))
        validation = test - gap - max(1, round(VALIDATION * len(frames)))
        parts.training.extend(frames[: validation - gap])
        parts.validation.extend(frames[validation : test - gap])
        parts.held_out.extend(frames[test:])
    if not parts.held_out:
        raise DataError(
            f"no trajectory has the {SHORTEST} frames that it takes to hold some out; "
            f"there are {len(parts.training)} frames in all"
        )
    return parts


def collate(frames: Sequence[Frame]) -> Batch:
    """Join frames into one batch."""
    sizes = torch.tensor([len(frame.numbers) for frame in frames])
    neighbours, shifts = _nobody(int(sizes.sum()), max(frame.neighbours.shape[1] for frame in frames))
    start = 0
    for frame in frames:
        atoms, width = frame.neighbours.shape
        neighbours[start : start + atoms, :width] = frame.neighbours + start
        shifts[start : start + atoms, :width] = frame.shifts
        start += atoms
    return Batch(
        numbers=torch.cat([frame.numbers for frame in frames]),
        positions=torch.cat([frame.positions for frame in frames]),
        neighbours=neighbours,
        shifts=shifts,
        owner=torch.repeat_interleave(torch.arange(len(frames)), sizes),
        sizes=sizes.float(),
        energy=torch.tensor([frame.energy for frame in frames], dtype=torch.float64),
        forces=torch.cat([frame.forces for frame in frames]),
    )


def batches(frames: Sequence[Frame], size: int = 128, *, shuffle: bool = False) -> DataLoader[Frame]:
    """Go through frames batch by batch, in their order or in a new one each time."""
    return DataLoader(cast(Dataset[Frame], list(frames)), batch_size=size, shuffle=shuffle, collate_fn=collate)


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
