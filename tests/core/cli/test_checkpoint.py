"""``nvalchemi checkpoint show`` and ``verify``, for a person and for a program."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from nvalchemi.cli import main
from nvalchemi.metadata import core_version
from nvalchemi.training import (
    ModelSpec,
    OptimizerConfig,
    TrainingStrategy,
    create_model_spec,
    save_checkpoint,
    save_training,
)
from nvalchemi.training.checkpoint.files import write_sections
from nvalchemi.training.checkpoint.manifest import read_manifest
from nvalchemi.training.hooks import PassThrough


@pytest.fixture
def root(tmp_path):
    """A checkpoint of a run with one hook."""
    strategy = TrainingStrategy(
        models=nn.Linear(2, 1), optimizer_configs=OptimizerConfig(), num_steps=3, hooks=[PassThrough()],
        loss_fn=lambda predictions, batch: predictions.sum(), progress=False,
    )  # fmt: skip
    strategy.run([torch.ones(1, 2)])
    save_training(tmp_path / "run", strategy)
    return tmp_path / "run"


def shown(root, capsys):
    assert main(["checkpoint", "show", str(root), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_show_says_what_is_in_a_run(root, capsys):
    """Kind, who wrote it, counters, sections with sizes, hooks with distribution and version, whether it would load."""
    data = shown(root, capsys)
    assert list(data) == [
        "root", "kind", "written_by", "progress", "sections", "hooks", "models", "loads_here", "problems", "remarks",
    ]  # fmt: skip
    assert (data["kind"], data["written_by"]) == ("training", f"nvalchemi-hooks {core_version()}")
    assert (data["progress"]["step_count"], data["progress"]["epoch"]) == (3, 3)
    assert [section["name"] for section in data["sections"]][0] == "models/main"
    assert all(section["size"] > 0 for section in data["sections"])
    [hook] = data["hooks"]
    assert (hook["key"], hook["distribution"], hook["keeps_state"]) == ("pass_through", "nvalchemi-hooks", False)
    assert (data["loads_here"], data["problems"], data["remarks"]) == (True, [], [])


def test_a_person_reads_columns(root, capsys):
    """Without --json it is text with the same in it."""
    assert main(["checkpoint", "show", str(root)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("A checkpoint of training, written by nvalchemi-hooks")
    assert "step_count 3" in text
    assert "pass_through  nvalchemi.training.hooks.update:PassThrough  nvalchemi-hooks" in text
    assert "Would load here: yes." in text


def test_show_says_what_to_install(tmp_path, capsys):
    """A hook whose distribution is missing, of another version, or of nobody: a sentence each; it still loads."""
    hook = {"name": "noise", "class": "acme_hooks.noise:Noise", "distribution": "acme-hooks", "version": "2.0"}
    hooks = {"noise": hook, "own": {**hook, "distribution": None}, "old": {**hook, "distribution": "nvalchemi-hooks"}}
    write_sections(tmp_path, {"hooks/noise": {"a": 1}}, kind="training", metadata={"hooks": hooks})
    data = shown(tmp_path, capsys)
    assert data["loads_here"] is True
    assert data["remarks"] == [
        "The hook 'noise' needs acme-hooks, which is not installed: pip install acme-hooks==2.0; "
        "without it, its state is kept and saved again.",
        "The hook 'own' (acme_hooks.noise:Noise) comes from no installed distribution; have its code at hand.",
        f"The hook 'old' was saved by nvalchemi-hooks 2.0; {core_version()} is installed.",
    ]


def test_show_says_what_models_need(tmp_path, capsys):
    """Classes of torch.nn load by themselves, others need to be allowed, and those of a missing package do not load."""
    own = ModelSpec("json.decoder:JSONDecoder", {})
    gone = ModelSpec("no_such_package.models:Net", {})
    linear = create_model_spec(nn.Linear, in_features=1, out_features=1)
    specs = {name: spec.to_json() for name, spec in {"a": linear, "b": own, "c": gone}.items()}
    write_sections(tmp_path, {f"models/{name}": {} for name in specs}, kind="models", metadata={"specs": specs})
    data = shown(tmp_path, capsys)
    assert data["loads_here"] is False
    assert data["problems"] == [
        "The model 'c' is a no_such_package.models:Net, but there is no package 'no_such_package' here."
    ]
    assert data["remarks"] == ["The model 'b' is a json.decoder:JSONDecoder: load it with allow=['json.decoder']."]


def test_show_finds_a_module_that_is_gone_from_its_package(tmp_path, capsys, monkeypatch):
    """The package is there and the module of the model is not: it does not load, and the package is not imported."""
    package = tmp_path / "shrunken"
    (package / "nets").mkdir(parents=True)
    for folder in (package, package / "nets"):
        (folder / "__init__.py").write_text("raise SystemExit('ran')")
    (package / "nets" / "kept.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    targets = {"a": "shrunken.nets.kept:Net", "b": "shrunken.nets.gone:Net", "c": "shrunken.nets.kept.gone:Net"}
    specs = {name: {"target": target, "kwargs": {}} for name, target in targets.items()}
    write_sections(
        tmp_path / "root", {f"models/{name}": {} for name in specs}, kind="models", metadata={"specs": specs}
    )
    assert shown(tmp_path / "root", capsys)["problems"] == [
        "The model 'b' is a shrunken.nets.gone:Net, but there is no module 'shrunken.nets.gone' here.",
        "The model 'c' is a shrunken.nets.kept.gone:Net, but there is no module 'shrunken.nets.kept.gone' here.",
    ]


@pytest.mark.parametrize("command", ["show", "verify"])
@pytest.mark.parametrize("section", ["run", "position", "optimizers"])
def test_a_section_that_is_missing_in_the_manifest_is_a_problem(tmp_path, capsys, command, section):
    """A manifest, its digest right, that leaves out a part of the state: it is not whole and would not load."""
    parts = ["models", "optimizers", "run", "position"]
    sections = {name: {} for name in ("models/main", *parts[1:]) if name != section}
    write_sections(tmp_path, sections, kind="training", metadata={"parts": parts})
    main(["checkpoint", command, str(tmp_path), "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["loads_here" if command == "show" else "whole"] is False
    assert f"The manifest names no file for '{section}', which no save leaves out; do not trust it." in str(data)


def test_show_names_a_file_that_cannot_be_read(root, capsys):
    """A section that the system does not open is a problem, with the system's reason."""
    manifest = read_manifest(root)
    path = root / manifest.data / manifest.sections["run"].file
    path.unlink()
    path.mkdir()
    data = shown(root, capsys)
    assert data["loads_here"] is False
    assert "section 'run' cannot be read: Is a directory" in data["problems"][0]


@pytest.mark.parametrize("command", ["show", "verify"])
def test_what_a_terminal_would_act_upon_is_escaped(tmp_path, capsys, command):
    """Names in a stranger's manifest cannot colour, move or rename the terminal of whoever looks at it."""
    evil = "\x1b[31mred\x1b]0;title\x07\n\ud800é"
    hooks = {evil: {"name": evil, "class": evil, "distribution": evil, "version": evil}}
    specs = {evil: {"target": f"{evil}:{evil}", "kwargs": {}}}
    metadata = {"hooks": hooks, "specs": specs, "written_by": evil, "progress": {evil: 1}}
    write_sections(tmp_path, {f"models/{evil}": 1}, kind=evil, metadata=metadata)
    main(["checkpoint", command, str(tmp_path)])
    out = capsys.readouterr().out
    assert r"models/\x1b[31mred\x1b]0;title\x07\n\ud800é" in out
    assert all(one.isprintable() for line in out.split("\n") for one in line)


def test_show_names_missing_and_truncated_files(root, capsys):
    """A file that is not there or has another size is a problem; the sums are verify's business."""
    manifest = read_manifest(root)
    (root / manifest.data / manifest.sections["run"].file).unlink()
    data = shown(root, capsys)
    assert data["loads_here"] is False
    assert "section 'run') is missing" in data["problems"][0]


def test_verify_finds_a_flipped_byte(root, capsys):
    """A whole checkpoint is exit code 0; a changed byte is 1 and names the section."""
    assert main(["checkpoint", "verify", str(root)]) == 0
    assert "models/main  whole" in capsys.readouterr().out
    manifest = read_manifest(root)
    path = root / manifest.data / manifest.sections["optimizers"].file
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    assert main(["checkpoint", "verify", str(root), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["whole"] is False
    problems = {section["name"]: section["problem"] for section in result["sections"]}
    assert "is damaged: its SHA-256 is" in problems.pop("optimizers")
    assert set(problems.values()) == {""}


@pytest.mark.parametrize("command", ["show", "verify"])
def test_where_there_is_no_checkpoint_the_reason_is_on_standard_error(tmp_path, capsys, command):
    """Exit code 1, and one sentence."""
    assert main(["checkpoint", command, str(tmp_path / "nowhere")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"nvalchemi: error: There is no checkpoint in {tmp_path / 'nowhere'}")


def test_an_unknown_format_is_named(tmp_path, capsys):
    """A file of a newer version is no traceback."""
    (tmp_path / "manifest.json").write_text('{"format": 9}')
    assert main(["checkpoint", "show", str(tmp_path)]) == 1
    assert "has the format 9" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["show", "verify"])
def test_neither_torch_nor_the_models_code_is_imported(tmp_path, command):
    """A stranger's checkpoint can be looked at: nothing that it names is imported, nor is torch."""
    (tmp_path / "stranger_models.py").write_text("raise SystemExit('ran')")
    root = tmp_path / "root"
    spec = create_model_spec(nn.Linear, in_features=1, out_features=1)
    save_checkpoint(root, models={"main": (nn.Linear(1, 1), spec)})
    specs = {"main": {"target": "stranger_models:Net", "kwargs": {}}}
    write_sections(root, {"models/main": {}}, kind="models", metadata={"specs": specs})
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from nvalchemi.cli import main\n"
        f"code = main(['checkpoint', {command!r}, {str(root)!r}])\n"
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'stranger_models')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
