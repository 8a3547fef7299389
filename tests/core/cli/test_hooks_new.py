"""``nvalchemi hooks new``: what it writes installs, is found and passes its tests; what it cannot write it refuses."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from nvalchemi.cli import main
from nvalchemi.cli.app import ExitCode
from nvalchemi.cli.new.names import checked_names
from nvalchemi.cli.new.render import write_all


@pytest.fixture
def new(tmp_path, capsys):
    """Run the command with defaults; returns exit code, folder and standard error."""

    def run(name, *arguments, folder=tmp_path / "written"):
        code = main(["hooks", "new", name, "--defaults", "--output", str(folder), *arguments])
        return code, folder, capsys.readouterr().err

    return run


@pytest.fixture
def terminal(monkeypatch):
    """Let somebody sit at a terminal and give these answers."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    return lambda *answers: monkeypatch.setattr(sys, "stdin", Terminal("".join(f"{line}\n" for line in answers)))


def files_of(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What comes out for the name of the documentation."""
    folder = tmp_path_factory.mktemp("new") / "my-hook"
    command = [sys.executable, "-m", "nvalchemi", "hooks", "new", "my-hook", "--defaults", "--output", folder]
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    return folder


@pytest.fixture(scope="module")
def installed(install, written):
    """The same, built as a wheel and installed."""
    return install(written)


def test_it_writes_a_whole_distribution(written):
    """Everything that a published hook needs is there, and nothing else."""
    package = {f"src/my_hook/{name}" for name in ("__init__.py", "hook.py", "plugin.py", "py.typed")}
    tests = {"tests/test_conformance.py", "tests/test_hook.py"}
    beside = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "tox.ini", ".gitignore"}
    assert files_of(written) == package | tests | beside | {".github/workflows/tests.yml"}


def test_it_passes_its_own_tests_once_installed(installed, written):
    """The wheel is installed, and its tests pass, those of the kit among them: by its entry point too."""
    output = installed.run("-m", "pytest", "-v", "-p", "no:cacheprovider", cwd=written)
    assert re.search(r"TestMyHook: 2\d checks run", output)
    assert "test_it_is_found_by_its_entry_point PASSED" in output
    assert "failed" not in output


def test_a_strategy_finds_it_by_its_name(installed, written, tmp_path):
    """The program of its card runs."""
    [program] = re.findall(r"```python\n(.*?)```", (written / "README.md").read_text(), re.DOTALL)
    (tmp_path / "program.py").write_text(program + "print(strategy.hooks[0].steps)\n")
    assert installed.run("program.py", cwd=tmp_path) == "1\n"


def test_its_card_has_the_sections_of_every_card(written):
    """A reader finds the headings that the official cards have."""
    card = (written / "README.md").read_text()
    assert "`pip install -e '.[test]'`, and `pytest` runs its tests" in card
    sections = re.findall(r"^## (.*)$", card, re.MULTILINE)
    assert sections == [
        "What it does", "How to use it", "What it does at which stage", "Cost", "Do not combine with", "References",
    ]  # fmt: skip


def test_its_core_range_holds_the_core_that_wrote_it(site, new):
    """The range goes to the version that may change the hook API: before 1.0 the next minor one, then a major."""
    for version, expected in (("0.1.7", ">=0.1,<0.2"), ("2.3.1", ">=2.3,<3")):
        site.add("nvalchemi-hooks", version)
        _, folder, _ = new("my-hook", folder=site.path / version)
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        assert project["dependencies"][0] == f"nvalchemi-hooks{expected}"


def test_answers_are_asked_for_at_a_terminal(tmp_path, terminal, capsys):
    """An answer is taken, an empty line takes what is proposed, and what was given is not asked."""
    terminal("Noise on gradients", "")
    arguments = ["hooks", "new", "grad-noise", "--output", str(tmp_path / "new"), "--license", "BSD-3-Clause"]
    assert main(arguments) == ExitCode.DONE
    project = tomllib.loads((tmp_path / "new" / "pyproject.toml").read_text())["project"]
    assert (project["description"], project["license"]) == ("Noise on gradients", "BSD-3-Clause")
    assert project["authors"][0]["name"]
    assert "BSD 3-Clause License" in (tmp_path / "new" / "LICENSE").read_text()
    assert "license [" not in capsys.readouterr().out


def test_where_nobody_can_be_asked_it_says_so(tmp_path, monkeypatch, capsys):
    """Without a terminal and without --defaults nothing is written, and the remedy is named."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert main(["hooks", "new", "grad-noise", "--output", str(tmp_path / "new")]) == ExitCode.FAILED
    assert "add --defaults" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("My Hook", "'my-hook' for example"),
        ("GradNoise", "'grad-noise' for example"),
        ("2nd-order", "'nd-order' for example"),
        ("grad--noise", "'grad-noise' for example"),
        ("", "'my-hook' for example"),
        ("../evil", "'evil' for example"),
        ("lambda", "a word of the Python language"),
        ("json", "a module of Python's standard library"),
        ("torch", "would hide another that is needed"),
        ("test", "would hide another that is needed"),
        ("ema", "the name of an official hook"),
        ("grad-clip", "the name of an official hook"),
        ("auto", "means something else in a configuration"),
        ("nvalchemi-hooks-noise", "what our own distributions begin with"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(new, name, reason):
    """The message has the name and says what to give instead; nothing is written."""
    code, folder, error = new(name)
    assert code == ExitCode.FAILED
    assert repr(name) in error
    assert reason in error
    assert not folder.exists()


@pytest.mark.parametrize("name", ["grad-noise", "grad_noise", "noise2", "my-hook"])
def test_names_follow_from_each_other(name):
    """Distribution, package and class are one name in three spellings, and the class ends in Hook once."""
    names = checked_names(name)
    assert names.package == names.distribution.replace("-", "_") == name.replace("-", "_")
    assert names.cls.lower().removesuffix("hook") == names.package.replace("_", "").removesuffix("hook")


def test_an_occupied_folder_is_left_alone(new, tmp_path):
    """A folder with something in it, or a file in its place, is refused as it is."""
    folder = tmp_path / "written"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    code, _, error = new("my-hook")
    assert (code, files_of(folder)) == (ExitCode.FAILED, {"mine.txt"})
    assert f"{folder} is not empty, so nothing was written; give another folder with --output" in error
    code, _, error = new("my-hook", folder=folder / "mine.txt")
    assert (code, (folder / "mine.txt").read_text()) == (ExitCode.FAILED, "mine")
    assert "is no folder" in error


def test_an_occupied_folder_is_refused_before_anything_is_asked_and_again_before_writing(tmp_path, monkeypatch, capsys):
    """Nobody answers questions in vain; and what came into the folder meanwhile is safe."""
    (tmp_path / "mine.txt").write_text("mine")
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # asking would fail
    assert main(["hooks", "new", "my-hook", "--output", str(tmp_path)]) == ExitCode.FAILED
    assert "is not empty" in capsys.readouterr().err
    with pytest.raises(FileExistsError, match="is not empty"):
        write_all({"mine.txt": "other"}, tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_an_empty_folder_is_written_to(new, tmp_path):
    """A folder that is there and empty stays the same folder."""
    folder = tmp_path / "written"
    folder.mkdir()
    inode = folder.stat().st_ino
    assert new("my-hook")[0] == ExitCode.DONE
    assert "pyproject.toml" in files_of(folder)
    assert folder.stat().st_ino == inode


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("method", ["write_text", "rename"])
def test_nothing_is_left_half_written(new, tmp_path, monkeypatch, exists, method):
    """When the disk fails after some files, no file is left, and a folder only if it was there."""
    folder, real, calls = tmp_path / "written", getattr(Path, method), []
    if exists:
        folder.mkdir()

    def fails(self, *arguments, **options):
        calls.append(self)
        if len(calls) > 3:
            raise OSError("no space left")
        return real(self, *arguments, **options)

    monkeypatch.setattr(Path, method, fails)
    code, _, error = new("my-hook")
    assert code == ExitCode.FAILED
    assert "no space left" in error
    assert folder.exists() == exists
    assert not exists or not any(folder.iterdir())


@pytest.mark.parametrize("option", ["--summary", "--author"])
def test_an_answer_that_would_break_a_file_is_refused(new, option):
    """Quotation marks, backslashes and line ends have no place in what becomes TOML and Python."""
    for text in ('a "b"', "a\\b", "a\nb"):
        code, folder, error = new("my-hook", option, text)
        assert code == ExitCode.FAILED
        assert repr(text) in error
        assert not folder.exists()


def test_without_jinja2_it_says_what_to_install(new, monkeypatch):
    """The renderer is no dependency of the core; the message has the extra, and nothing is written."""
    monkeypatch.setitem(sys.modules, "jinja2", None)
    code, folder, error = new("my-hook")
    assert code == ExitCode.FAILED
    assert "jinja2, which is not installed: pip install 'nvalchemi-hooks[new]'" in error
    assert not folder.exists()
