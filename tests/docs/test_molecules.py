"""The main example: what it reads, what it holds out, its physics, its flags and what it reports."""

import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import ase
import ase.io
import numpy as np
import pytest
import torch
from ase.calculators.singlepoint import SinglePointCalculator
from hypothesis import given, settings
from hypothesis import strategies as st

import nvalchemi
from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "molecules"
MODULES = ("graphs", "data", "model", "evaluate", "keep", "report", "train")


@pytest.fixture(scope="module")
def example():
    """The modules of the example, which import each other as the scripts of one folder do."""
    hidden = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    sys.path.insert(0, str(EXAMPLE))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    sys.path.remove(str(EXAMPLE))
    for name in MODULES:
        sys.modules.pop(name)
    sys.modules.update(hidden)


@pytest.fixture(scope="module")
def trajectories(example):
    """What is committed."""
    return example.data.load()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to work in; what the command line sets in torch is taken back."""
    monkeypatch.chdir(tmp_path)
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    yield tmp_path
    torch.set_num_threads(threads)
    torch.set_rng_state(random)


@pytest.fixture
def run(example, folder, capsys):
    """Run the command line; gives what it printed, in one line, and its figures."""

    def run(*arguments):
        example.train.main([*arguments, "--json", "figures.json"])
        printed = " ".join(capsys.readouterr().out.split())
        return printed, json.loads((folder / "figures.json").read_text(encoding="utf-8"))

    return run


@pytest.fixture
def refused(example, folder, capsys):
    """Run the command line, which is expected to refuse; gives what it says."""

    def refused(*arguments):
        with pytest.raises(SystemExit) as stop:
            example.train.main(arguments)
        assert stop.value.code == 2
        assert not list(folder.glob("*.png"))
        return capsys.readouterr().err

    return refused


def water(frames=12, *, seed=0, forces=True, energy=True, **info):
    """A made-up trajectory of a molecule on springs, as ASE's own objects."""
    rng = np.random.default_rng(seed)
    rest = np.array([[0.0, 0.0, 0.0], [0.96, 0.0, 0.0], [-0.24, 0.93, 0.0]])
    made = []
    for _ in range(frames):
        shift = 0.05 * rng.normal(size=rest.shape)
        atoms = ase.Atoms("OH2", rest + shift, info=info)
        labels = {"energy": -2000.0 + 10 * (shift**2).sum()} if energy else {}
        atoms.calc = SinglePointCalculator(atoms, **labels, **({"forces": -20 * shift} if forces else {}))
        made.append(atoms)
    return made


# What is committed.


def test_embedded_data_are_what_the_readme_says():
    """The file beside the README is the one whose checksum and size stand in it, and small enough to commit."""
    readme = (EXAMPLE / "data" / "README.md").read_text(encoding="utf-8")
    content = (EXAMPLE / "data" / "molecules.npz").read_bytes()
    assert hashlib.sha256(content).hexdigest() in readme
    assert f"{len(content):,} bytes" in readme
    assert len(content) <= 1_000_000


def test_embedded_data_are_molecules_in_the_units_they_claim(trajectories):
    """Bonds are some Å long, no net force acts, energies spread by a fraction of an eV around a steady mean."""
    assert [name for name, _ in trajectories] == ["ethanol", "acetone", "acetamide"]
    assert sum(len(frames) for _, frames in trajectories) >= 1000
    for _, frames in trajectories:
        energies = np.array([frame.energy for frame in frames])
        assert 0.05 < energies.std() < 0.5
        assert abs(energies[: len(frames) // 2].mean() - energies[len(frames) // 2 :].mean()) < energies.std() / 2
        for frame in frames[::50]:
            nearest = torch.cdist(frame.positions, frame.positions).fill_diagonal_(torch.inf).amin(dim=1)
            assert nearest.min() > 0.8
            assert nearest.max() < 1.7
            assert frame.forces.sum(dim=0).abs().max() < 1e-4
            assert 0.1 < frame.forces.abs().mean() < 3


def test_embedded_forces_are_the_slope_of_the_energies(trajectories):
    """Of pairs of frames that are near each other, the work of the mean force explains the difference in energy."""
    frames = trajectories[0].frames
    flat = torch.stack([torch.cdist(frame.positions, frame.positions).flatten() for frame in frames])
    apart = torch.cdist(flat, flat) + 1e3 * torch.eye(len(frames))
    explained = []
    for first, second in zip(range(len(frames)), apart.argmin(dim=1).tolist(), strict=True):
        a, b = frames[first], frames[second]
        turned = b.positions @ (turn := rotation_onto(b.positions, a.positions))
        work = -(0.5 * (a.forces + b.forces @ turn) * (turned - a.positions)).sum().item()
        explained.append((work, b.energy - a.energy))
    work, difference = np.array(explained).T
    assert np.corrcoef(work, difference)[0, 1] > 0.9


def rotation_onto(moved, fixed):
    """The rotation that brings centred points nearest to others (Kabsch)."""
    u, _, v = torch.linalg.svd(moved.T @ fixed)
    flip = torch.diag(torch.tensor([1.0, 1.0, torch.sign(torch.det(u @ v)).item()]))
    return u @ flip @ v


# What is held out.


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=4))
def test_held_out_frames_come_after_all_training_frames(example, lengths):
    """In each trajectory: training, a gap, validation, a gap, held out to the end; training alone if it is short."""
    trajectories = [example.data.Trajectory(str(k), [(k, t) for t in range(n)]) for k, n in enumerate(lengths)]
    if max(lengths) < example.data.SHORTEST:
        with pytest.raises(example.data.DataError, match=f"no trajectory has the {example.data.SHORTEST} frames"):
            example.data.split(trajectories)
        return
    parts = example.data.split(trajectories)
    for k, length in enumerate(lengths):
        training, validation, held_out = ([t for owner, t in part if owner == k] for part in parts)
        if length < example.data.SHORTEST:
            assert (training, validation, held_out) == (list(range(length)), [], [])
            continue
        assert training == list(range(len(training)))
        assert training[-1] + 1 < validation[0] <= validation[-1] < held_out[0] - 1
        assert held_out == list(range(held_out[0], length))
        assert len(training) >= length / 2
        assert len(held_out) >= length / 10


def test_frames_of_a_file_are_split_by_system_in_file_order(example, tmp_path):
    """Other atoms, another order of atoms or another ``config_type`` make another trajectory; each keeps its order."""
    cold, hot = water(11, config_type="300K"), water(12, seed=1, config_type="600K")
    turned = [atoms[[1, 0, 2]] for atoms in cold[:1]]
    turned[0].calc = SinglePointCalculator(turned[0], energy=-1.0, forces=np.zeros((3, 3)))
    mixed = [atoms for pair in zip(cold, hot[:11], strict=True) for atoms in pair] + hot[11:] + turned
    ase.io.write(tmp_path / "mixed.xyz", mixed, format="extxyz")
    read = example.data.load([tmp_path / "mixed.xyz"])
    assert [(name, len(frames)) for name, frames in read] == [("H2O 300K", 11), ("H2O 600K", 12), ("H2O 300K", 1)]
    for (_, frames), images in zip(read, (cold, hot, turned), strict=True):
        assert [frame.energy for frame in frames] == pytest.approx([atoms.get_potential_energy() for atoms in images])
        assert frames[0].positions.numpy() == pytest.approx(images[0].positions, abs=1e-6)
        assert frames[0].forces.numpy() == pytest.approx(images[0].get_forces(), abs=1e-6)


def test_the_trivial_prediction_is_the_training_mean_of_the_composition(example, trajectories):
    """It knows nothing of the held-out energies, and predicts no forces."""
    parts = example.data.split(trajectories)
    trivial = example.evaluate.trivial(parts)
    energies = [frame.energy for frame in parts.training if frame.composition == parts.held_out[-1].composition]
    assert trivial.energy[-1].item() == pytest.approx(np.mean(energies), abs=1e-9)
    errors = example.evaluate.errors_of(trivial, parts.held_out)
    forces = torch.cat([frame.forces for frame in parts.held_out])
    assert errors.force_mae == pytest.approx(1e3 * forces.abs().mean().item())


# The physics of the model.


@pytest.fixture
def potential(example):
    """A potential with random weights, in double precision."""
    torch.manual_seed(0)
    return example.model.Potential(torch.randn(119).double(), scale=1.0, features=8, radial=6).double().eval()


def in_double(batch):
    return replace(batch, positions=batch.positions.double(), shifts=batch.shifts.double())


@pytest.fixture
def pair(example, trajectories):
    """One frame of ethanol and one of acetone in a batch."""
    return in_double(example.graphs.collate([trajectories[0].frames[0], trajectories[1].frames[0]]))


def test_energy_does_not_change_when_molecules_are_moved_or_turned(potential, pair):
    """Energies are invariant under translation, rotation and reflection; forces turn with the molecule."""
    before = potential(pair)
    for sign in (1, -1):
        turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
        turn = turn * sign * torch.det(turn)
        after = potential(replace(pair, positions=pair.positions @ turn + 7.0, shifts=pair.shifts @ turn))
        assert torch.allclose(after.energy, before.energy, rtol=0, atol=1e-10)
        assert torch.allclose(after.forces, before.forces @ turn, rtol=0, atol=1e-10)


def test_energy_does_not_depend_on_the_numbering_of_atoms(example, potential, trajectories):
    """Equal atoms are equal: in another order they have the same energy, and each keeps its force."""
    frame = trajectories[2].frames[5]
    order = torch.randperm(len(frame.numbers))
    numbers, x, forces = (part[order].numpy() for part in (frame.numbers, frame.positions, frame.forces))
    other = example.graphs.make_frame(numbers, x, frame.energy, forces, example.graphs.free_pairs(x))
    before, after = (potential(in_double(example.graphs.collate([one]))) for one in (frame, other))
    assert after.energy.item() == pytest.approx(before.energy.item(), abs=1e-10)
    assert torch.allclose(after.forces, before.forces[order], rtol=0, atol=1e-10)


def test_forces_are_the_negative_gradient_of_the_energy(potential, pair):
    """Central differences of the energy agree with the forces, for every coordinate of both molecules."""
    forces, h = potential(pair).forces, 1e-4
    for place in range(pair.positions.numel()):
        step = torch.zeros_like(pair.positions)
        step.view(-1)[place] = h
        up, down = (potential(replace(pair, positions=pair.positions + s)).energy.sum() for s in (step, -step))
        assert -((up - down) / (2 * h)).item() == pytest.approx(forces.view(-1)[place].item(), abs=1e-6)


def test_training_differentiates_twice(example, potential, pair):
    """The gradient of a loss on the forces with respect to a weight agrees with central differences."""
    weight, h = potential.layers[0].filter.weight, 1e-5

    def loss():
        return potential(pair).forces.square().sum()

    potential.train()
    loss().backward()
    slope = weight.grad[2, 1].item()
    values = []
    for step in (h, -2 * h):
        weight.data[2, 1] += step
        values.append(loss().item())
    assert slope == pytest.approx((values[0] - values[1]) / (2 * h), rel=1e-5)


def test_a_frame_has_the_same_prediction_alone_and_in_a_batch(example, potential, trajectories):
    """Frames of a batch do not see each other, whatever their sizes."""
    frames = [trajectories[k].frames[9] for k in (1, 0, 2)]
    together = potential(in_double(example.graphs.collate(frames)))
    alone = [potential(in_double(example.graphs.collate([frame]))) for frame in frames]
    assert torch.allclose(together.energy, torch.cat([one.energy for one in alone]), rtol=0, atol=1e-10)
    assert torch.allclose(together.forces, torch.cat([one.forces for one in alone]), rtol=0, atol=1e-10)


def test_a_periodic_cell_twice_as_large_has_twice_the_energy(example, potential, tmp_path):
    """Neighbours are found across the boundaries of a cell, also of one that is smaller than the cutoff."""
    atoms = ase.Atoms(
        "NaCl", [[0.1, 0, 0], [2.9, 2.7, 2.8]], cell=[[4.9, 0, 0], [0.6, 5.2, 0], [0, 0.3, 5.6]], pbc=True
    )
    cells = [atoms, atoms.repeat((2, 1, 1)), atoms.repeat((1, 1, 2))]
    for cell in cells:
        cell.calc = SinglePointCalculator(cell, energy=0.0, forces=np.zeros((len(cell), 3)))
    ase.io.write(tmp_path / "salt.xyz", cells, format="extxyz")
    frames = [frame for _, frames in example.data.load([tmp_path / "salt.xyz"]) for frame in frames]
    small, *large = potential(in_double(example.graphs.collate(frames))).energy.tolist()
    assert large == pytest.approx([2 * small, 2 * small], abs=1e-5)


def test_half_precision_leaves_geometry_energies_and_forces_in_full(example, trajectories):
    """Under autocast results keep their dtypes, stay near full precision, and hardly notice how a molecule lies."""
    batch = example.graphs.collate(trajectories[0].frames[:4])
    reference = example.data.fit_reference(trajectories[0].frames)
    torch.manual_seed(0)
    potential = example.model.Potential(reference, scale=1.0).eval()
    exact, turn = potential(batch), torch.linalg.qr(torch.randn(3, 3)).Q
    turned = replace(batch, positions=batch.positions @ turn, shifts=batch.shifts @ turn)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            half, again = potential(batch), potential(turned)
        assert (half.energy.dtype, half.forces.dtype) == (torch.float64, torch.float32)
        assert not torch.equal(half.forces, exact.forces)
        assert (half.energy - exact.energy).abs().max() < 0.02
        assert (half.energy - again.energy).abs().max() < 1e-4
        assert (half.forces - exact.forces).abs().max() < 0.05 * exact.forces.abs().max()


# The command.


def test_a_run_learns_and_says_where_its_results_are(tmp_path):
    """As a user starts it: a table, a picture, and figures with errors that have fallen well below the trivial ones."""
    command = [sys.executable, "-W", "error::UserWarning", str(EXAMPLE / "train.py"), "--steps", "60"]
    done = subprocess.run(
        [*command, "--json", "out.json", "--plot", "out.png"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONSAFEPATH": "", "COLUMNS": "100"},
    )
    figures = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert set(figures) >= {"baseline", "live", "averaged", "steps", "vetoed", "clipped", "seconds"}
    for weights in ("baseline", "live", "averaged"):
        assert set(figures[weights]) == {"energy_mae", "force_mae"}
        assert f"{figures[weights]['force_mae']:.1f}" in done.stdout
        assert f"{figures[weights]['energy_mae']:.2f}" in done.stdout
    assert figures["live"]["force_mae"] < figures["baseline"]["force_mae"] / 2
    assert (figures["steps"], figures["vetoed"]) == (60, 0)
    assert 0 < figures["clipped"] <= 60
    assert f"60 steps taken, 0 vetoed, {figures['clipped']} clipped" in done.stdout
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    for name in ("out.json", "out.png"):
        assert str((tmp_path / name).resolve()) in done.stdout
    assert "mixed_precision, scaler_veto, grad_clip, ema" in done.stdout


def test_equal_seeds_give_equal_figures(run):
    """A run is reproducible; another seed is another run."""
    (_, first), (_, again), (_, other) = (run("--steps", "2", "--seed", seed) for seed in "778")
    for figures in (first, again, other):
        figures.pop("seconds")
    assert first == again
    assert first["live"] != other["live"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains(run, precision):
    """The steps are taken, and differ from those in full precision."""
    _, full = run("--steps", "3")
    _, half = run("--steps", "3", "--precision", precision)
    assert half["steps"] == 3
    assert np.isfinite([*half["live"].values(), *half["averaged"].values()]).all()
    assert half["live"] != full["live"]


def test_hooks_can_be_chosen(run):
    """Only what is named joins: without averages there are none to report, without clipping nothing is clipped."""
    printed, figures = run("--steps", "2", "--hooks", "grad_clip")
    assert figures["averaged"] is None
    assert "not kept" in printed
    assert figures["clipped"] == 2
    printed, figures = run("--steps", "2", "--hooks", "ema, loss_scaling")
    assert figures["clipped"] == 0
    assert figures["averaged"] is not None
    printed, figures = run("--steps", "1", "--hooks", "")
    assert "hooks: none" in printed


def test_steps_can_be_made_of_several_batches(run):
    """With --accumulate a step is taken for so many batches, weighted by their atoms; the figures say so."""
    _, figures = run("--steps", "2", "--accumulate", "2")
    assert figures["steps"] == 2
    assert figures["settings"]["hooks"]["grad_accum"] == {"steps": 2, "weight": "sizes"}


def test_figures_say_how_they_were_made(run, tmp_path):
    """Seed, precision, hooks with what they were told, data and version stand in the file."""
    ase.io.write(tmp_path / "a.xyz", water(12), format="extxyz")
    told = ("--seed", "7", "--precision", "bf16", "--hooks", "mixed_precision,ema", "--data", "a.xyz")
    _, figures = run("--steps", "1", *told)
    assert figures["settings"] == {
        "seed": 7,
        "precision": "bf16",
        "hooks": {"mixed_precision": {"precision": "bf16"}, "ema": {"decay": 0.99}},
        "data": ["a.xyz"],
        "nvalchemi-hooks": nvalchemi.__version__,
    }


def test_the_learning_rate_does_not_depend_on_the_length_of_the_run(example):
    """It rises to its peak, and is at a fifth of it after the default run: a run can be made longer at any time."""
    factors = [example.train.rise_and_fall(step) for step in range(2880)]
    assert max(factors) == factors[example.train.WARM_UP - 1] == 1.0
    assert factors[0] == pytest.approx(1 / example.train.WARM_UP)
    assert factors[-1] == pytest.approx(0.2, rel=0.05)


def test_own_data_can_be_trained_on(run, tmp_path):
    """Any extended XYZ with energies and forces serves, also several files, for some epochs."""
    ase.io.write(tmp_path / "a.xyz", water(30), format="extxyz")
    ase.io.write(tmp_path / "b.xyz", water(20, seed=1), format="extxyz")
    printed, figures = run("--data", "a.xyz,b.xyz", "--epochs", "2")
    assert "H2O, H2O: 33 configurations to train on, 3 for the learning curve, 10 held out" in printed
    assert figures["steps"] == 2 * 3


def test_the_picture_is_left_out_where_matplotlib_is_missing(run, monkeypatch, tmp_path):
    """The figures are there all the same, and a sentence says what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    printed, figures = run("--steps", "1")
    assert "pip install matplotlib" in printed
    assert figures["steps"] == 1
    assert not list(tmp_path.glob("*.png"))


def test_only_closed_windows_count_as_vetoed(example):
    """A step that waits for more batches is not one that was vetoed."""
    recorder = example.report.Recorder()
    for skipped, complete in ((True, True), (True, False), (False, True)):
        ctx = TrainContext(losses={"force_mae": torch.ones(())}, step_skipped=skipped, window_complete=complete)
        recorder(ctx, TrainingStage.AFTER_BATCH)
    assert recorder.vetoed == 1


def test_a_log_shows_signs_of_life(run, monkeypatch):
    """A line after every tenth of the run, unless a terminal shows a progress bar."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    printed, _ = run("--steps", "20", "--hooks", "")
    told = re.findall(r"(\d+) of 20 steps in \d+ s, force error of the latest batch [\d.]+ meV/Å", printed)
    assert told == [str(done) for done in range(2, 21, 2)]


# What is kept; test_molecules_keep.py has what needs processes of its own.


def test_a_folder_of_another_run_is_refused(run, refused, tmp_path):
    """Without --resume nothing is overwritten, and with it another precision, seed or data are no continuation."""
    run("--steps", "2", "--checkpoint", "run")
    (tmp_path / "molecules.png").unlink()
    assert "latest is step-00000002; add --resume to go on with it" in refused("--steps", "2", "--checkpoint", "run")
    again = ("--steps", "4", "--checkpoint", "run", "--resume")
    assert "--precision is bf16, but fp32 in the run of the checkpoint" in refused(*again, "--precision", "bf16")
    assert "--seed is 3, but 0 in the run of the checkpoint" in refused(*again, "--seed", "3")
    assert run(*again)[1]["steps"] == 4


def test_a_run_may_always_be_started_with_resume(run):
    """One command starts a job again and again: where there is no checkpoint yet, it says so, and begins."""
    printed, figures = run("--steps", "1", "--checkpoint", "run", "--resume")
    assert "no checkpoint in run yet: the run starts from the beginning" in printed
    assert figures["steps"] == 1


def test_without_averages_the_live_weights_are_exported(run, tmp_path):
    """What no hook kept is not in the file."""
    run("--steps", "1", "--hooks", "", "--export", "weights.pt")
    assert set(torch.load(tmp_path / "weights.pt", weights_only=True)) == {"live"}
    assert [path.name for path in tmp_path.glob("weights*")] == ["weights.pt"]


# What is refused.


def test_a_frame_without_labels_is_named(refused, tmp_path):
    """The message has the file, the frame, what is missing and what to write."""
    for missing, labels in (("forces", {"forces": False}), ("energy", {"energy": False})):
        ase.io.write(tmp_path / "lacking.xyz", [*water(2), *water(1, **labels)], format="extxyz")
        said = refused("--data", "lacking.xyz")
        assert f"lacking.xyz, frame 2 (the first is 0): no {missing} (" in said
        assert "forces:R:3" in said
    (tmp_path / "plain.xyz").write_text("1\ndft_energy=-1.0\nH 0 0 0\n")
    assert "frame 0 (the first is 0): no energy and no forces (beside positions it has: dft_energy)" in refused(
        "--data", "plain.xyz"
    )


def test_a_frame_with_labels_that_are_not_finite_is_named(refused, tmp_path):
    """One nan would spoil every weight."""
    frames = water(12)
    frames[7].calc.results["forces"][0, 0] = np.nan
    ase.io.write(tmp_path / "spoilt.xyz", frames, format="extxyz")
    assert "spoilt.xyz, frame 7 (the first is 0): energy, forces or positions hold inf or nan" in refused(
        "--data", "spoilt.xyz"
    )


def test_a_file_that_is_none_is_named(refused, tmp_path):
    """Missing, empty, something else, or too short to hold anything out."""
    (tmp_path / "other.xyz").write_text("no number here\n")
    (tmp_path / "empty.xyz").write_text("")
    ase.io.write(tmp_path / "short.xyz", water(9), format="extxyz")
    assert "nowhere.xyz: there is no such file" in refused("--data", "nowhere.xyz")
    (tmp_path / "folder").mkdir()
    assert "folder is a folder; name the files in it" in refused("--data", "folder")
    assert "other.xyz: not an extended-XYZ file that ASE can read" in refused("--data", "other.xyz")
    assert "empty.xyz: " in refused("--data", "empty.xyz")
    assert "no trajectory has the 10 frames" in refused("--data", "short.xyz")


def test_flags_that_make_no_sense_are_refused(refused):
    """Each with its value or its remedy, before anything is trained."""
    assert "did you mean 'ema'?" in refused("--hooks", "emma")
    assert "loss_scaling" in refused("--hooks", "loss_scaling,mixed_precision")
    assert "add it to --hooks" in refused("--hooks", "ema", "--precision", "bf16")
    assert "0 is not 1 or more" in refused("--steps", "0")
    assert "not allowed with argument" in refused("--steps", "3", "--epochs", "3")
    assert "there is no folder" in refused("--json", "nowhere/out.json")
    assert "there is no folder" in refused("--plot", "nowhere/out.png")
    assert "there is no folder" in refused("--export", "nowhere/weights.pt")
    assert "name it: --checkpoint DIR" in refused("--resume")
    for file in ("out.xyz", "out"):
        said = refused("--plot", file)
        assert f"{file} is no picture that matplotlib can write; its suffix may be ." in said
        assert ".pdf, " in said
    assert "devices is 'cuda:99', which cannot be used here" in refused("--device", "cuda:99")
    assert "devices is 'gpu', which cannot be used here" in refused("--device", "gpu")


def test_help_shows_every_flag_and_examples(example, capsys):
    """What the example can do is found out from the example."""
    with pytest.raises(SystemExit):
        example.train.main(["--help"])
    said = capsys.readouterr().out
    flags = ("steps", "epochs", "seed", "hooks", "precision", "data", "json", "plot", "threads", "device")
    for flag in (*flags, "checkpoint", "resume", "export"):
        assert re.search(rf"--{flag}\b", said)
    assert "examples:" in said
