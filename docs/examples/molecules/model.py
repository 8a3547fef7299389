"""A small interatomic potential in plain torch: message passing through the moments of each atom's surroundings.

Every atom carries features ``s``. A layer lets each neighbour send features weighted by learnt functions of the
distance, collects them as moments of the direction (a scalar, a vector, a traceless matrix), and takes from the moments
what no rotation changes: the scalar, two lengths, and how the matrix stretches the vector. The energy is a sum over
atoms; forces are its negative gradient with respect to the positions, so training differentiates twice.

It is SchNet (Schütt et al., J. Chem. Phys. 148, 241722, 2018) with angular moments like those of moment tensor
potentials (Shapeev, Multiscale Model. Simul. 14, 1153, 2016).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from graphs import CUTOFF, Batch
from torch import Tensor, nn


class Prediction(NamedTuple):
    """What the potential says about a batch: ``energy`` [frames], eV, float64, and ``forces`` [atoms, 3], eV/Å."""

    energy: Tensor
    forces: Tensor


def dense(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Two layers with a smooth activation; autocast may run them in half precision."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, outputs))


class Layer(nn.Module):
    """Let every atom look at its neighbours once."""

    def __init__(self, features: int, radial: int) -> None:
        super().__init__()
        self.filter = nn.Linear(radial, features, bias=False)
        self.send = nn.Linear(features, features, bias=False)
        self.mix = dense(5 * features, features, features)

    def forward(self, s: Tensor, neighbours: Tensor, radial: Tensor, angular: Tensor) -> Tensor:
        """Return the features [atoms, F] after one look."""
        sent = self.send(s).to(radial.dtype)[neighbours]
        with torch.autocast(radial.device.type, enabled=False):  # geometry keeps full precision
            moments = angular.transpose(1, 2) @ (self.filter(radial) * sent)  # [atoms, 13, F]
            scalar, vector, matrix = moments.split([1, 3, 9], dim=1)
            stretched = (matrix.unflatten(1, (3, 3)) * vector.unsqueeze(1)).sum(dim=2)
            invariant = [scalar.squeeze(1), norm(vector, 1), norm(matrix, 1), (stretched * vector).sum(dim=1)]
        return s + self.mix(torch.cat([s, *invariant], dim=1)).to(s.dtype)


def norm(x: Tensor, dim: int) -> Tensor:
    """Length along a dimension, differentiable at zero."""
    return (x.square().sum(dim) + 1e-6).sqrt()


class Potential(nn.Module):
    """Energy and forces of a batch of molecules.

    Parameters
    ----------
    reference : Tensor
        Energy a chemical element, eV, float64 [119]; see ``data.fit_reference``.
    scale : float
        Unit of the learnt atomic energies, eV: the size of the forces is a good choice.
    features, layers, radial : int
        Width, number of layers, number of radial functions.
    """

    reference: Tensor
    frequencies: Tensor

    def __init__(self, reference: Tensor, scale: float, features: int = 48, layers: int = 2, radial: int = 16) -> None:
        super().__init__()
        self.scale = scale
        self.embedding = nn.Embedding(len(reference), features)
        self.layers = nn.ModuleList(Layer(features, radial) for _ in range(layers))
        self.readout = dense(features, features, 1)
        self.register_buffer("reference", reference.double())
        self.register_buffer("frequencies", torch.arange(1, radial + 1) * math.pi / CUTOFF)

    def energies(self, batch: Batch, positions: Tensor) -> Tensor:
        """Sum the atomic energies of each frame: float64 [frames], eV."""
        displacement = positions[batch.neighbours] + batch.shifts - positions.unsqueeze(1)
        distance = norm(displacement, 2).unsqueeze(2)
        envelope = 0.5 + 0.5 * torch.cos(distance * (math.pi / CUTOFF))
        radial = torch.sin(distance * self.frequencies) * (envelope / distance)
        x = displacement / distance
        outer = (x.unsqueeze(3) * x.unsqueeze(2) - torch.eye(3, dtype=x.dtype, device=x.device) / 3).flatten(2)
        angular = torch.cat([torch.ones_like(distance), x, outer], dim=2)
        s = self.embedding(batch.numbers)
        for layer in self.layers:
            s = layer(s, batch.neighbours, radial, angular)
        with torch.autocast(x.device.type, enabled=False):
            atomic = self.reference[batch.numbers] + self.scale * self.readout(s).squeeze(1).double()
        return atomic.new_zeros(len(batch.energy)).index_add(0, batch.owner, atomic)

    @torch.enable_grad()
    def forward(self, batch: Batch) -> Prediction:
        """Predict energies, and forces by autograd; the graph of the forces is kept in training only."""
        positions = batch.positions.detach().requires_grad_()
        energy = self.energies(batch, positions)
        (gradient,) = torch.autograd.grad(energy.sum(), positions, create_graph=self.training)
        return Prediction(energy, -gradient)
