"""``nvalchemi hooks list``, for a person and for a program."""

from __future__ import annotations

import json
import os
import pty
import sys

import pytest

from nvalchemi.cli import main

FIELDS = ["name", "target", "distribution", "version", "api_range", "state", "reason"]


def run(site, *arguments, **environment):
    """Run the command in a process of its own."""
    return site.run(
        "-c", f"import sys; from nvalchemi.cli import main; sys.exit(main({list(arguments)!r}))", **environment
    )


def test_json_has_every_field_of_every_hook(site, capsys):
    """The array holds one object a hook, sorted by name, with exactly the documented fields."""
    site.add_plugin("acme-hooks", ["noise", "centre"], "1.2", requires=["nvalchemi-hooks>=0.1"])
    assert main(["hooks", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [list(hook) for hook in listed] == [FIELDS, FIELDS]
    assert listed[1] == {
        "name": "noise",
        "target": "acme_hooks.plugin",
        "distribution": "acme-hooks",
        "version": "1.2",
        "api_range": ">=0.1",
        "state": "available",
        "reason": "",
    }


def test_the_process_imports_neither_torch_nor_pydantic_nor_rich_nor_a_plugin(site):
    """After the whole command, none of them is among the modules."""
    site.add_plugin("acme-hooks", ["noise"])
    code = (
        "import sys; from nvalchemi.cli import main; code = main(['hooks', 'list', '--json'])\n"
        "heavy = ('torch', 'pydantic', 'pluggy', 'rich', 'acme_hooks')\n"
        "print([module for module in heavy if module in sys.modules], file=sys.stderr)\n"
        "sys.exit(code)"
    )
    done = site.run("-c", code)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    assert "noise" in [hook["name"] for hook in json.loads(done.stdout)]


def test_broken_plugins_cannot_make_it_fail(site):
    """Modules that raise, exit or are not there are listed like any other."""
    site.add("exits", hooks={"exits": "exits_now"}, modules={"exits_now": "import os; os._exit(3)"})
    site.add("gone", hooks={"gone": "not.there"})
    done = run(site, "hooks", "list", "--json")
    assert done.returncode == 0
    assert {"exits", "gone"} <= {hook["name"] for hook in json.loads(done.stdout)}


def test_in_a_pipe_nothing_is_coloured_or_cut(site):
    """A long reason and a long target stand whole on the line of their hook, without escape sequences."""
    target = "acme_hooks." + "deeply." * 30 + "plugin"
    site.add("acme-hooks", hooks={"noise": target})
    done = run(site, "hooks", "list", NVALCHEMI_HOOKS_DISABLE="noise", COLUMNS="40")
    [line] = [line for line in done.stdout.splitlines() if line.startswith("noise ")]
    assert target in line
    assert line.endswith("switched off by NVALCHEMI_HOOKS_DISABLE")
    assert "\x1b" not in done.stdout
    assert done.stdout.splitlines()[0].split() == [
        "NAME",
        "STATE",
        "DISTRIBUTION",
        "VERSION",
        "CORE",
        "TARGET",
        "REASON",
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_on_a_terminal_a_coloured_table_is_drawn(site):
    """On a terminal the states are coloured; what is too wide is folded, not cut."""
    site.add_plugin("acme-hooks", ["noise"])
    pid, master = pty.fork()
    if pid == 0:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site.path), os.environ.get("PYTHONPATH", "")])}
        environment |= {"TERM": "xterm-256color", "COLUMNS": "60"}
        environment.pop("NO_COLOR", None)
        os.execve(sys.executable, [sys.executable, "-m", "nvalchemi", "hooks", "list"], environment)
    output = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # Linux says so when the other side is closed
            break
        if not chunk:
            break
        output += chunk
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert b"\x1b[32mavailable" in output
    assert "…".encode() not in output


def test_an_empty_list_says_how_to_install(site, capsys):
    """A person is told the commands; a program gets an empty array; both are no failure."""
    assert main(["hooks", "list"]) == 0
    assert "pip install 'nvalchemi-hooks[all]'" in capsys.readouterr().out
    assert main(["hooks", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_misspelt_switch_is_told_on_standard_error(site, monkeypatch, capsys):
    """The warning stands beside the listing, which stays readable for a program."""
    site.add_plugin("acme-hooks", ["noise"])
    monkeypatch.setenv("NVALCHEMI_HOOKS_DISABLE", "noize")
    assert main(["hooks", "list", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)[0]["state"] == "available"
    assert err.startswith("nvalchemi: warning: NVALCHEMI_HOOKS_DISABLE names 'noize'")
    assert "did you mean 'noise'" in err
