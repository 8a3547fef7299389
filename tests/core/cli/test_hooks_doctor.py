"""``nvalchemi hooks doctor``: each ailment is found, named, and has a remedy; a healthy environment has none."""

from __future__ import annotations

import json
import sys

import pytest

from nvalchemi.cli import main
from nvalchemi.training.checkpoint.files import write_sections


@pytest.fixture
def healthy(site):
    """The core with its extras, and a plugin that fits."""
    site.add("nvalchemi-hooks", "0.5", headers={"Provides-Extra": "ema\nProvides-Extra: grad-clip"})
    site.add_plugin("acme-hooks", ["noise"], requires=["nvalchemi-hooks[ema]>=0.1"])
    return site


def doctor(capsys, *arguments):
    """Return the exit code and what was found."""
    code = main(["hooks", "doctor", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def only(capsys, *arguments):
    """Return the one thing that was found."""
    code, [found] = doctor(capsys, *arguments)
    assert code == 1
    assert found["remedy"]
    return found


def test_a_healthy_environment_is_exit_code_zero(healthy, capsys):
    """Nothing is found, a person is told so, and no plugin was imported."""
    assert doctor(capsys) == (0, [])
    assert main(["hooks", "doctor"]) == 0
    assert capsys.readouterr().out == (
        "Nothing is wrong with the hooks of this environment, as far as metadata tells.\n"
    )
    assert "acme_hooks.plugin" not in sys.modules


def test_a_distribution_that_is_installed_twice(healthy, tmp_path, capsys):
    """Both versions and both places are named, whichever of them counts."""
    later = tmp_path / "later"
    healthy.roots.append(later)
    healthy.add_plugin("Acme_Hooks", ["noise"], "0.9", root=later)
    found = only(capsys)
    assert (found["kind"], found["subject"]) == ("duplicate", "acme-hooks")
    assert f"0.9 in {later}" in found["problem"]
    assert f"1.0 in {healthy.path}" in found["problem"]
    assert "pip uninstall acme-hooks" in found["remedy"]


@pytest.mark.parametrize(
    "target", ["gone_hooks.plugin", "acme_hooks.gone", "acme_hooks.plugin.deeper:x", "not a module"]
)
def test_an_entry_point_whose_module_is_gone(healthy, capsys, target):
    """Entry point, distribution and version are named; a package above the module is not imported to find out."""
    healthy.add("gone-hooks", "2.0", hooks={"gone": target})
    found = only(capsys)
    assert (found["kind"], found["subject"]) == ("gone", "gone")
    assert f"gone = {target} of gone-hooks 2.0" in found["problem"]
    assert "acme_hooks" not in sys.modules


def test_a_name_that_two_distributions_offer(healthy, capsys):
    """It is one finding, with both ways to choose."""
    healthy.add_plugin("zeta-hooks", ["noise"])
    found = only(capsys)
    assert (found["kind"], found["subject"]) == ("clash", "noise")
    assert "write 'acme-hooks:noise' or 'zeta-hooks:noise'" in found["problem"]


def test_a_version_out_of_range(healthy, capsys):
    """Both versions are in the sentence."""
    healthy.add_plugin("old-hooks", ["old"], requires=["nvalchemi-hooks<0.3"])
    found = only(capsys)
    assert (found["kind"], found["subject"]) == ("range", "old")
    assert "made for nvalchemi-hooks <0.3, and 0.5 is installed" in found["problem"]


def test_a_misspelt_extra_of_an_installed_distribution(healthy, capsys):
    """Who asks, what for, and the closest there is; any spelling of a right one is right."""
    healthy.add("job", "1.0", requires=["nvalchemi_hooks[ema,grad_clip,gradclip] ; extra == 'train'", "torch[nope]"])
    found = only(capsys)
    assert (found["kind"], found["subject"]) == ("extra", "gradclip")
    assert "job 1.0 asks for nvalchemi-hooks[gradclip]" in found["problem"]
    assert "did you mean 'grad-clip'?" in found["problem"]


REQUIREMENTS = {
    "requirements.txt": "-r other.txt\n# nvalchemi-hooks[all]\nnvalchemi-hooks[emma] >= 0.1  # average\n./core[x]\n",
    "pyproject.toml": '[project]\nname = "job"\n[project.optional-dependencies]\ntrain = ["nvalchemi-hooks[emma]"]\n',
}


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_a_misspelt_extra_of_a_requirements_file(healthy, tmp_path, capsys, name):
    """An installer would leave it out with no more than a warning; the file is named."""
    path = tmp_path / name
    path.write_text(REQUIREMENTS[name])
    found = only(capsys, "--requirements", str(path))
    assert (found["kind"], found["subject"]) == ("extra", "emma")
    assert f"{path} asks for nvalchemi-hooks[emma], and there is no such extra; did you mean 'ema'?" in found["problem"]
    main(["hooks", "doctor", "--requirements", str(path)])
    assert "did you mean 'ema'?\n  To do: write one of" in capsys.readouterr().out


def test_the_toolkit_with_the_same_package_name(healthy, capsys):
    """The two cannot live in one environment."""
    healthy.add("NVAlchemi_Toolkit", "0.1")
    found = only(capsys)
    assert (found["kind"], found["subject"]) == ("toolkit", "nvalchemi-toolkit")
    assert "`nvalchemi`" in found["problem"]


def test_a_switch_that_switches_nothing(healthy, monkeypatch, capsys):
    """A misspelt name in the environment is found as well."""
    monkeypatch.setenv("NVALCHEMI_HOOKS_DISABLE", "noize")
    found = only(capsys)
    assert (found["kind"], found["subject"]) == ("switch", "NVALCHEMI_HOOKS_DISABLE")
    assert "did you mean 'noise'" in found["problem"]


def test_a_plugin_that_a_checkpoint_needs(healthy, tmp_path, capsys):
    """The hook, its distribution and the command to install it; hooks that are there or belong to nobody are fine."""
    hook = {"name": "n", "class": "a.b:C", "distribution": "gone-hooks", "version": "2.0"}
    hooks = {"gone": hook, "here": {**hook, "distribution": "acme-hooks"}, "own": {**hook, "distribution": None}}
    write_sections(tmp_path / "run", {}, kind="training", metadata={"hooks": hooks})
    found = only(capsys, "--checkpoint", str(tmp_path / "run"))
    assert (found["kind"], found["subject"]) == ("checkpoint", "gone-hooks")
    assert "the hook 'gone' of gone-hooks 2.0" in found["problem"]
    assert "pip install gone-hooks==2.0" in found["remedy"]


@pytest.mark.parametrize("option", ["--checkpoint", "--requirements"])
def test_what_cannot_be_read_is_an_error(healthy, tmp_path, capsys, option):
    """A place where nothing is: a sentence with the place, exit code 1."""
    assert main(["hooks", "doctor", option, str(tmp_path / "nothing")]) == 1
    assert f"{tmp_path / 'nothing'}" in capsys.readouterr().err


def test_a_person_reads_problem_and_remedy(healthy, capsys):
    """Two lines a finding, without colours in a pipe."""
    healthy.add("gone-hooks", "2.0", hooks={"gone": "gone_hooks"})
    assert main(["hooks", "doctor"]) == 1
    assert capsys.readouterr().out == (
        "gone: the entry point gone = gone_hooks of gone-hooks 2.0 names a module that is not there.\n"
        "  To do: install gone-hooks again, or uninstall it.\n"
    )


def test_the_process_imports_neither_torch_nor_a_plugin(healthy):
    """The environment may be too ill for that."""
    code = "import sys; from nvalchemi.cli import main; main(['hooks', 'doctor'])\nprint('torch' in sys.modules)"
    done = healthy.run("-c", code)
    assert done.stdout.splitlines()[-1] == "False", done.stderr
