"""The command itself: help, version, exit codes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nvalchemi.cli import main
from nvalchemi.cli.app import ExitCode
from nvalchemi.hooks import list_hooks


@pytest.mark.parametrize("arguments", [["--help"], ["hooks", "--help"], ["hooks", "list", "--help"]])
def test_every_help_exits_with_zero(arguments, capsys):
    """Help is on standard output and says what the command does."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0
    assert "hooks" in capsys.readouterr().out


def test_the_help_of_list_teaches_states_switches_and_exit_codes(capsys):
    """Every state, every environment variable and the exit codes are explained where a person looks."""
    with pytest.raises(SystemExit):
        main(["hooks", "list", "--help"])
    text = capsys.readouterr().out
    words = ["available", "disabled", "not allowed", "incompatible", "clash", "broken", "exit codes", "--json"]
    for word in [*words, "NVALCHEMI_HOOKS_DISABLE", "NVALCHEMI_HOOKS_ALLOW", "NVALCHEMI_HOOKS_STRICT"]:
        assert word in text


@pytest.mark.parametrize("arguments", [[], ["hooks"]])
def test_without_a_command_the_help_is_shown(arguments, capsys):
    """A word alone shows what can follow it."""
    assert main(arguments) == ExitCode.DONE
    assert "usage: nvalchemi" in capsys.readouterr().out


def test_version_names_the_core_and_the_hook_api(site, capsys):
    """``--version`` is read from the installed metadata."""
    site.add("nvalchemi-hooks", "7.1")
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == "nvalchemi-hooks 7.1 (hook API 1)\n"


@pytest.mark.parametrize(
    "arguments", [["hoks"], ["hooks", "lst"], ["hooks", "list", "--jsn"], ["hooks", "list", "--js"]]
)
def test_a_command_line_that_is_not_understood_exits_with_two(arguments, capsys):
    """Unknown words and options, abbreviated ones too, are a usage error on standard error."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == ExitCode.USAGE
    assert "usage: nvalchemi" in capsys.readouterr().err


def test_an_error_with_a_message_exits_with_one(site, monkeypatch, capsys):
    """What the core raises is one line on standard error, not a traceback."""

    def fails():
        raise LookupError("there is no such hook")

    monkeypatch.setattr("nvalchemi.hooks.plugins.catalog.list_hooks", fails)
    assert list_hooks() == []
    assert main(["hooks", "list"]) == ExitCode.FAILED
    assert capsys.readouterr().err == "nvalchemi: error: there is no such hook\n"


def test_an_interrupt_exits_with_130(site, monkeypatch):
    """Ctrl-C gives the shell's own code for it."""

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("nvalchemi.hooks.plugins.catalog.list_hooks", interrupted)
    assert main(["hooks", "list"]) == ExitCode.INTERRUPTED


def test_a_reader_that_goes_away_is_no_traceback(site):
    """``nvalchemi hooks list | true`` ends quietly."""
    command = f"{sys.executable} -m nvalchemi hooks list --json | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout.strip() in ("0", str(int(ExitCode.BROKEN_PIPE)))
