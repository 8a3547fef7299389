"""Make ``data/molecules.npz``: GFN2-xTB molecular dynamics of three small organic molecules.

Run once, by whoever maintains the example; training needs only the file it writes::

    pip install tblite==0.8.0 ase==3.29.0
    OMP_NUM_THREADS=1 python make_data.py

Method, units and terms stand in ``data/README.md``.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path

import numpy as np
from ase import Atoms, units
from ase.build import molecule
from ase.constraints import FixCom
from ase.md.langevin import Langevin
from ase.md.velocitydistribution import Stationary, thermalize_momenta
from ase.optimize import BFGS
from tblite.ase import TBLite

MOLECULES = {"ethanol": "CH3CH2OH", "acetone": "CH3COCH3", "acetamide": "CH3CONH2"}
"""Name of the trajectory -> name of the starting geometry in ASE's G2 collection."""

TEMPERATURE_K = 500.0
TIMESTEP_FS = 0.5
FRICTION_PER_FS = 0.01
EQUILIBRATION_STEPS = 4_000
STRIDE_STEPS = 100
SEED = 20190
DEFAULT_FRAMES = 700


def calculator() -> TBLite:
    """Build a GFN2-xTB calculator with a tight convergence of the charges."""
    return TBLite(method="GFN2-xTB", accuracy=0.1, verbosity=0)


def single_point(frame: Atoms) -> tuple[np.ndarray, float, np.ndarray]:
    """Round the positions to what is stored, then compute energy and forces at exactly these positions."""
    stored = (frame.positions - frame.get_center_of_mass()).astype(np.float32)
    copy = Atoms(frame.numbers, stored.astype(np.float64), calculator=calculator())
    return stored, float(copy.get_potential_energy()), copy.get_forces().astype(np.float32)


def trajectory(geometry: str, frames: int, seed: int) -> dict[str, np.ndarray]:
    """Relax, heat, equilibrate, then keep every ``STRIDE_STEPS``-th step of Langevin dynamics, in order."""
    rng = np.random.default_rng(seed)
    atoms = molecule(geometry)
    atoms.calc = calculator()
    atoms.set_constraint(FixCom())
    BFGS(atoms, logfile=None).run(fmax=0.02, steps=200)
    thermalize_momenta(atoms, TEMPERATURE_K, rng=rng)
    Stationary(atoms)
    dynamics = Langevin(
        atoms,
        timestep=TIMESTEP_FS * units.fs,
        temperature_K=TEMPERATURE_K,
        friction=FRICTION_PER_FS / units.fs,
        rng=rng,
        fixcm=False,
    )
    dynamics.run(EQUILIBRATION_STEPS)
    kept = []
    for _ in range(frames):
        dynamics.run(STRIDE_STEPS)
        kept.append(single_point(atoms))
    positions, energies, forces = zip(*kept, strict=True)
    return {
        "numbers": atoms.numbers.astype(np.uint8),
        "positions": np.stack(positions),
        "energies": np.array(energies, dtype=np.float64),
        "forces": np.stack(forces),
    }


def main() -> None:
    """Run every trajectory and write one compressed file; say how large it is and its checksum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=DEFAULT_FRAMES, help="frames kept of each molecule")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data" / "molecules.npz")
    options = parser.parse_args()
    arrays: dict[str, np.ndarray] = {}
    for index, (name, geometry) in enumerate(MOLECULES.items()):
        start = time.perf_counter()
        made = trajectory(geometry, options.frames, SEED + index)
        arrays |= {f"{name}.{key}": value for key, value in made.items()}
        spread = 1e3 * made["energies"].std()
        force = 1e3 * np.abs(made["forces"]).mean()
        seconds = time.perf_counter() - start
        print(
            f"{name}: {options.frames} frames, spread of the energy {spread:.0f} meV, "
            f"mean |force component| {force:.0f} meV/Å, {seconds:.0f} s",
            flush=True,
        )
    np.savez_compressed(options.out, **arrays)
    content = options.out.read_bytes()
    print(f"{options.out}: {len(content) / 1e6:.3f} MB, sha256 {hashlib.sha256(content).hexdigest()}")


if __name__ == "__main__":
    main()
