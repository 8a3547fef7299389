"""Configurations as graphs of near atoms, one by one and in batches.

Units everywhere: Å for lengths, eV for energies, eV/Å for forces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

CUTOFF = 5.0
"""Atoms further apart than this (Å) do not see each other."""


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
    """float32 [n, k, 3], Å: the periodic image of the neighbour; one cutoff away where there is none."""

    @property
    def composition(self) -> tuple[int, ...]:
        """The atomic numbers in sorted order, which name the composition."""
        return tuple(sorted(self.numbers.tolist()))


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


Pairs = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Who sees whom: receivers in rising order [e], senders [e], and the shift of the sender's image [e, 3], Å."""


def free_pairs(positions: np.ndarray) -> Pairs:
    """List the pairs of a molecule in empty space."""
    distances = np.linalg.norm(positions[:, None] - positions[None], axis=-1)
    np.fill_diagonal(distances, np.inf)
    i, j = np.nonzero(distances < CUTOFF)
    return i, j, np.zeros((len(i), 3))


def make_frame(numbers: np.ndarray, positions: np.ndarray, energy: float, forces: np.ndarray, pairs: Pairs) -> Frame:
    """Turn arrays into a frame: a row of neighbours for each atom."""
    i, j, shifts = pairs
    counts = np.bincount(i, minlength=len(numbers))
    column = np.arange(len(i)) - np.repeat(counts.cumsum() - counts, counts)
    neighbours, away = _nobody(len(numbers), int(counts.max(initial=0)))
    neighbours[i, column] = torch.from_numpy(j)
    away[i, column] = torch.from_numpy(shifts).float()
    return Frame(
        torch.from_numpy(numbers).long(),
        torch.from_numpy(positions).float(),
        float(energy),
        torch.from_numpy(forces).float(),
        neighbours,
        away,
    )


def _nobody(atoms: int, width: int) -> tuple[Tensor, Tensor]:
    """Build a table in which every neighbour is the atom itself one cutoff away, where the potential vanishes."""
    neighbours = torch.arange(atoms)[:, None].repeat(1, width)
    return neighbours, torch.tensor([CUTOFF, 0.0, 0.0]).repeat(atoms, width, 1)


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
