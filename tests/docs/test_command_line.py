"""The page on the command line: nothing is missing, nothing on it is wrong."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nvalchemi.cli import main
from nvalchemi.cli.app import ExitCode, build_parser
from nvalchemi.hooks.plugins import switches

PAGE = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
EXAMPLES = [line for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


def commands(parser):
    """Yield every parser that has no further words."""
    words = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not words:
        yield parser
    for action in words:
        for below in action.choices.values():
            yield from commands(below)


COMMANDS = {parser.prog: parser for parser in commands(build_parser())}


def test_every_command_has_a_section_and_every_section_a_command():
    """A new command is missed here, and one that is gone as well."""
    assert [title for title in SECTIONS if title.startswith("nvalchemi ")] == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_argument_of_a_command_is_in_its_section(command):
    """Options, with what they take, and positions stand in the synopsis, and nothing else does."""
    [synopsis] = re.findall(rf"`{command}( [^`]*)`", SECTIONS[command])
    wanted = set()
    for action in COMMANDS[command]._actions:
        if action.option_strings == ["-h", "--help"]:
            continue
        name = action.option_strings[-1] if action.option_strings else (action.metavar or action.dest.upper())
        wanted.add(name if action.option_strings else name.upper())
    assert (
        set(re.findall(r"--[a-z-]+|(?<= )[A-Z]+(?= |$)", re.sub(r"\[(--[a-z-]+)[^]]*\]", r" \1 ", synopsis))) == wanted
    )


@pytest.mark.parametrize("line", EXAMPLES)
def test_every_example_is_understood(line):
    """The parser takes each line of the page as it stands."""
    program, *words = shlex.split(line)
    assert program == "nvalchemi"
    assert callable(build_parser().parse_args(words).run)


HELP_EXAMPLES = [
    re.split(r"\s{2,}", line.strip())[0]
    for parser in (build_parser(), *COMMANDS.values())
    for line in (parser.epilog or "").partition("examples:")[2].splitlines()
    if line.strip()
]


@pytest.mark.parametrize("line", HELP_EXAMPLES)
def test_every_example_of_a_help_is_understood(line):
    """What is shown can be pasted."""
    program, *words = shlex.split(line)
    assert program == "nvalchemi"
    assert callable(build_parser().parse_args(words).run)


def test_the_output_that_is_shown_is_printed(capsys):
    """The order under the first example of ``explain`` is what the command says."""
    [shown] = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    line = next(line for line in EXAMPLES if "explain" in line)
    assert main(shlex.split(line)[1:]) == ExitCode.DONE
    assert capsys.readouterr().out == shown


def test_exit_codes_and_variables_are_all_told():
    """The two tables hold every exit code and every switch, and no others."""
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)} == set(map(int, ExitCode))
    known = {value for value in vars(switches).values() if isinstance(value, str) and value.startswith("NVALCHEMI_")}
    assert set(re.findall(r"NVALCHEMI_HOOKS_[A-Z]+", PAGE)) == known


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_teaches(command, capsys):
    """It says what the command does, its exit codes, and where a program reads, what it reads."""
    with pytest.raises(SystemExit) as caught:
        main([*command.split()[1:], "--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert "exit codes:\n  0  " in text
    assert "  2  the command line was not understood" in text


def test_the_program_of_the_page_runs():
    """The plugin is registered, under its own name and version."""
    [program] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    ask = "from nvalchemi.hooks import list_hooks\nprint([h.distribution for h in list_hooks() if h.name == 'ema'])"
    done = subprocess.run(
        [sys.executable, "-c", program + ask], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("['nvalchemi-hooks-ema']", "")
