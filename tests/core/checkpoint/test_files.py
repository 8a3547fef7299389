"""What can be wrong with the files: each has its own message with path, name and remedy, and nothing is half loaded."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from nvalchemi.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointMissingError,
    CheckpointReadError,
    NotPlainDataError,
)
from nvalchemi.training import load_training, save_training
from nvalchemi.training.checkpoint.files import write_sections
from nvalchemi.training.checkpoint.manifest import read_manifest
from nvalchemi.training.checkpoint.reading import open_sections


def read_sections(root, kind):
    """Everything that a checkpoint holds."""
    with open_sections(root, kind=kind) as (sections, _):
        return dict(sections)


@pytest.fixture
def root(tmp_path, make_strategy, make_loader):
    """A checkpoint of a run."""
    strategy = make_strategy()
    strategy.train_batch(next(iter(make_loader())))
    save_training(tmp_path / "run", strategy)
    return tmp_path / "run"


def file_of(root, section):
    manifest = read_manifest(root)
    return root / manifest.data / manifest.sections[section].file


def rewrite(root, change):
    """Change the content of a manifest, with a right digest."""
    content = json.loads((root / "manifest.json").read_text())
    change(content)
    content.pop("digest")
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["digest"] = hashlib.sha256(canonical.encode()).hexdigest()
    (root / "manifest.json").write_text(json.dumps(content))


def forge(root, section):
    """Give a changed file the sum by which it passes for whole."""
    path = file_of(root, section)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    rewrite(root, lambda c: c["sections"][section].update(size=path.stat().st_size, sha256=digest))


def flip(path, place=-1):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "truncated": (lambda root: file_of(root, "optimizers").write_bytes(b"PK"), CheckpointDamagedError,
                  r"optimizers.pt \(section 'optimizers'\) is truncated: it has 2 bytes instead of \d+; bring it back"),
    "flipped byte": (lambda root: flip(file_of(root, "models/main"), 700), CheckpointDamagedError,
                     r"models-main.pt \(section 'models/main'\) is damaged: its SHA-256 is .* earlier checkpoint"),
    "missing file": (lambda root: file_of(root, "hooks/counting").unlink(), CheckpointMissingError,
                     r"hooks-counting.pt \(section 'hooks/counting'\) is missing, although the manifest names it"),
    "too long": (lambda root: file_of(root, "run").open("ab").write(b"x"), CheckpointDamagedError,
                 r"run.pt \(section 'run'\) is damaged: it has"),
    "no manifest": (lambda root: (root / "manifest.json").unlink(), CheckpointMissingError,
                    "no checkpoint in .*a save was begun there and never completed"),
    "manifest cut": (lambda root: (root / "manifest.json").write_text('{"format": 1'), CheckpointDamagedError,
                     r"manifest.json is damaged: it is no JSON"),
    "manifest altered": (lambda root: (root / "manifest.json").write_text(
        (root / "manifest.json").read_text().replace('"step_count": 1', '"step_count": 2')), CheckpointDamagedError,
        "manifest.json is damaged: its digest is not that of its content"),
    "newer format": (lambda root: (root / "manifest.json").write_text('{"format": 7}'), CheckpointFormatError,
                     "has the format 7, but this nvalchemi-hooks reads the formats 1 and 2; upgrade it: pip install"),
    "no format": (lambda root: (root / "manifest.json").write_text('{"format": "1"}'), CheckpointDamagedError,
                  "it has no format number"),
    "path out": (lambda root: rewrite(root, lambda c: c["sections"]["run"].update(file="../../secret.pt")),
                 CheckpointDamagedError, "names the file '../../secret.pt', which no save writes; do not trust it"),
    "folder out": (lambda root: rewrite(root, lambda c: c.update(data="..")), CheckpointDamagedError,
                   "names the folder '..', which no save makes"),
    "no metadata": (lambda root: rewrite(root, lambda c: c.update(metadata=None)), CheckpointDamagedError,
                    r"is damaged: manifest\['metadata'\] is None, a NoneType, instead of a mapping"),
    "hooks": (lambda root: rewrite(root, lambda c: c["metadata"].update(hooks=["ema"])), CheckpointDamagedError,
              r"manifest\['metadata'\]\['hooks'\] is \['ema'\], a list, instead of a mapping; bring it back"),
    "size": (lambda root: rewrite(root, lambda c: c["sections"]["run"].update(size="12")), CheckpointDamagedError,
             r"manifest\['sections'\]\['run'\]\['size'\] is '12', a str, instead of an int"),
    "no sum": (lambda root: rewrite(root, lambda c: c["sections"]["run"].update(sha256="\x1b[2J")),
               CheckpointDamagedError, r"names the SHA-256 '\\x1b\[2J', which is none; do not trust it"),
    "too deep": (lambda root: (root / "manifest.json").write_text("[" * 100_000), CheckpointDamagedError,
                 "is damaged: it is no JSON .*recursion"),
    "no section": (lambda root: rewrite(root, lambda c: c["sections"].pop("run")), CheckpointDamagedError,
                   "names no file for 'run', which no save leaves out; do not trust it"),
    "no models": (lambda root: rewrite(root, lambda c: c["sections"].pop("models/main")), CheckpointDamagedError,
                  "names no file for 'models'"),
    "manifest is a folder": (lambda root: ((root / "manifest.json").unlink(), (root / "manifest.json").mkdir()),
                             CheckpointReadError, "the manifest cannot be read: Is a directory; see to it that"),
    "section is a folder": (lambda root: (file_of(root, "run").unlink(), file_of(root, "run").mkdir()),
                            CheckpointReadError, "section 'run' cannot be read: Is a directory; see to it that"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_nothing_is_loaded(root, make_strategy, differences, damage):
    """Every kind of damage has its message, with the path and what to do; the run that wanted to load is as it was."""
    act, kind, message = DAMAGE[damage]
    act(root)
    strategy = make_strategy()
    strategy.setup()
    before = strategy.state_dict()
    with pytest.raises(kind, match=message) as caught:
        load_training(root, strategy)
    assert str(root) in str(caught.value)
    assert isinstance(caught.value, CheckpointError)
    assert differences(strategy.state_dict(), before) == []


@pytest.mark.parametrize("section", ["models/main", "optimizers", "schedulers", "hooks/counting", "run", "position"])
def test_any_flipped_bit_is_found(root, section):
    """Wherever a file is changed, first byte, middle or end, it is not loaded."""
    path = file_of(root, section)
    for place in (0, path.stat().st_size // 2, -1):
        flip(path, place)
        with pytest.raises(CheckpointDamagedError):
            read_sections(root, kind="training")
        flip(path, place)
    read_sections(root, kind="training")


def test_a_file_that_holds_code_is_not_run(root, tmp_path):
    """A stranger's file with right sums that would run something is refused, and nothing runs."""

    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "it ran",)

    path = file_of(root, "run")
    torch.save({"run": Evil()}, path)
    forge(root, "run")
    with pytest.raises(CheckpointDamagedError, match="holds something that is no plain data, so it was not loaded"):
        read_sections(root, kind="training")
    path.write_bytes(pickle.dumps(Evil()))
    forge(root, "run")
    with pytest.raises(CheckpointDamagedError, match="no plain data"):
        read_sections(root, kind="training")
    assert not (tmp_path / "it ran").exists()


FORGED = {
    "empty stack": b"\x80\x02.",
    "no such memo": b"\x80\x02h\x05.",
    "item of a number": b"\x80\x02K\x01K\x02K\x03s.",
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_file_is_named(root, what):
    """Whatever the unpickler raises on a stranger's file with right sums, the message names the file and what to do."""
    path = file_of(root, "run")
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (("data.pkl", FORGED[what]), ("version", b"3"), ("byteorder", b"little")):
            archive.writestr(f"x/{name}", data)
    forge(root, "run")
    with pytest.raises(CheckpointDamagedError, match=r"run.pt \(section 'run'\) holds something that is no plain data"):
        read_sections(root, kind="training")


def replace_while(monkeypatch, root, function, act):
    """Call `act` once when `function` of the reader is called for the second time."""
    from nvalchemi.training.checkpoint import reading

    original, calls = getattr(reading, function), []

    def called(*args, **options):
        calls.append(args)
        if len(calls) == 2:
            act()
        return original(*args, **options)

    monkeypatch.setattr(reading, function, called)


@pytest.mark.parametrize("function", ["open_section", "_refuse_code"])
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_anew(root, make_strategy, monkeypatch, function):
    """Another process saves into the same root while the files are opened or checked: the new one is loaded."""
    strategy = make_strategy()
    strategy.train_batch((torch.ones(4, 6), torch.zeros(4, 1)))
    strategy.train_batch((torch.ones(4, 6), torch.zeros(4, 1)))
    replace_while(monkeypatch, root, function, lambda: save_training(root, strategy))
    loaded = make_strategy()
    load_training(root, loaded)
    assert loaded.step_count == 2


def test_a_checkpoint_that_is_removed_while_it_is_read_is_missing(root, make_strategy, monkeypatch):
    """If no other takes its place, the message names the file that is gone, and nothing is tried for ever."""
    gone = file_of(root, "optimizers")
    replace_while(monkeypatch, root, "open_section", gone.unlink)
    with pytest.raises(CheckpointMissingError, match=r"section 'optimizers'\) is missing"):
        load_training(root, make_strategy())


class Loop:
    """A training loop of one's own."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state, *, fresh=()):
        self.state = as_dict(state)


LOOPS = [
    {"net/enc": 1, "net/dec": 0, "net": 2},
    {"models/a": 1, "models": {"b": 2}, "hooks/a": 3},
    {"models": {}, "hooks": {}},
    {"models": [1], "hooks": {"a": 5}, "run": 3},
    {"hooks": {"a": {"state": 1, "steps": 2}}, "run": {"counters": {"loss": 0.5}}},
    {"hooks": {"a": {"state": {"n": 1}, "name": "a"}, "b": {"name": "b"}}},
]


@pytest.mark.parametrize("state", LOOPS, ids=str)
def test_the_state_of_a_loop_of_ones_own_comes_back(tmp_path, state):
    """Whatever its parts are called and hold, a state that could be saved is given back equal, and nothing else."""
    save_training(tmp_path, Loop(state))
    loop = Loop(None)
    load_training(tmp_path, loop)
    assert loop.state == state


def as_dict(value):
    return {key: as_dict(one) for key, one in value.items()} if hasattr(value, "items") else value


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({1: 2}, "The state has the key 1, a int; use strings"),
        ({"models": {"a": 1}, "models/a": 2}, "The state has 'models/a' twice, in its part 'models/a' too; rename"),
    ],
)
def test_a_state_whose_parts_could_not_be_told_apart_is_refused(tmp_path, state, message):
    """Keys that are no strings, or that stand for another part's section, are named before anything is written."""
    with pytest.raises(NotPlainDataError, match=message):
        save_training(tmp_path / "root", Loop(state))
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("where", ["nowhere", "empty", "above"])
def test_where_there_is_no_checkpoint(root, tmp_path, make_strategy, where):
    """No folder, an empty one, and one with checkpoints in its folders are told apart."""
    (tmp_path / "empty").mkdir()
    place = {"nowhere": tmp_path / "nowhere", "empty": tmp_path / "empty", "above": tmp_path}[where]
    message = {
        "nowhere": "no such folder",
        "empty": "it has no manifest.json",
        "above": "in its folders: run; name one",
    }
    with pytest.raises(FileNotFoundError, match=message[where]):
        load_training(place, make_strategy())


def test_a_second_save_replaces_the_first(root, make_strategy):
    """In one root there is one checkpoint: the earlier one and what interrupted saves left are removed."""
    first = read_manifest(root).data
    (root / "data-0123456789abcdef").mkdir()
    (root / "mine").mkdir()
    save_training(root, make_strategy())
    names = {path.name for path in root.iterdir()}
    assert names == {"manifest.json", "mine", read_manifest(root).data}
    assert first not in names


@pytest.mark.parametrize("when", ["first file", "last file", "manifest", "rename"])
def test_a_save_that_fails_leaves_the_earlier_checkpoint(root, make_strategy, monkeypatch, when):
    """Whatever step of a save fails, the checkpoint that was there is untouched and nothing of the new one is left."""
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    module = "nvalchemi.training.checkpoint.files."
    saves = []

    def failing_save(value, file):
        saves.append(value)
        if len(saves) == (1 if when == "first file" else 6):
            raise KeyboardInterrupt
        torch_save(value, file)

    def fail(*args):
        raise KeyboardInterrupt

    torch_save = torch.save
    if when == "manifest":
        monkeypatch.setattr(module + "_write_text", fail)
    elif when == "rename":
        monkeypatch.setattr(Path, "replace", fail)
    else:
        monkeypatch.setattr(torch, "save", failing_save)
    with pytest.raises(KeyboardInterrupt):
        save_training(root, make_strategy())
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    assert len([path for path in root.iterdir() if path.is_dir()]) == 1


def test_the_files_are_flushed_before_the_manifest_is_renamed(root, make_strategy, monkeypatch):
    """All bytes are on the disk before the new checkpoint counts, and the rename is flushed too."""
    events = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append("flush") or fsync(descriptor))
    monkeypatch.setattr(Path, "replace", lambda self, target: events.append("rename") or replace(self, target))
    save_training(root, make_strategy())
    sections = len(read_manifest(root).sections)
    assert events == ["flush"] * (sections + 2) + ["rename", "flush"]


def test_names_of_sections_cannot_leave_the_folder(tmp_path):
    """A section, a hook's label for instance, may be called anything; its file has a plain name."""
    sections = {"hooks/../../x": 1, "hooks/ö ü": 2, "hooks/" + "long" * 100: 3, "hooks/": 4}
    write_sections(tmp_path, sections, kind="training")
    assert read_sections(tmp_path, kind="training") == sections
    assert {path.parent.parent for path in tmp_path.rglob("*.pt")} == {tmp_path}


def test_a_file_is_no_folder(tmp_path, make_strategy):
    """Saving over a file is an OSError that says what the matter is, and the file is kept."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="was not written"):
        save_training(tmp_path / "file", make_strategy())
    assert (tmp_path / "file").read_text() == "mine"
