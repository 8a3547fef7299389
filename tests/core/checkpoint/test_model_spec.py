"""Descriptions of models: what they refuse when they are made, and what a file may not build."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn

from nvalchemi.errors import ModelImportError, ModelNotAllowedError, ModelSpecError
from nvalchemi.training import ModelSpec, create_model_spec


class Net(nn.Module):
    """A model of one's own, with a model inside."""

    def __init__(self, inner, widths=(1, 2), *, scale=1.0):
        super().__init__()
        self.inner, self.widths, self.scale = inner, widths, scale


def make_net(width):
    return nn.Linear(width, width)


def test_a_spec_survives_json_and_builds_the_same():
    """Tuples, dtypes and models inside come back as they were."""
    inner = create_model_spec(nn.Linear, in_features=2, out_features=1, dtype=torch.float64)
    spec = create_model_spec(Net, inner=inner, widths=(3, 4), scale=0.5)
    back = ModelSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert back == spec
    net = back.build(allow=[Net])
    assert (net.widths, net.scale, net.inner.weight.dtype) == ((3, 4), 0.5, torch.float64)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: create_model_spec(lambda: None), "<lambda>.*cannot be imported by name.*at the top of a module"),
        (lambda: create_model_spec(nn.Linear, in_features=2, outfeatures=1), "Linear does not take these arguments.*"),
        (lambda: create_model_spec(nn.Linear, in_features=2), "missing a required argument: 'out_features'"),
        (
            lambda: create_model_spec(Net, inner=object()),
            r"Net\(...\)\['inner'\] is <object.*a object.*create_model_spec",
        ),
        (lambda: create_model_spec(Net, inner=nn.Linear(1, 1)), r"\['inner'\] is Linear.*create_model_spec\(\.\.\.\)"),
        (lambda: create_model_spec(Net, inner=[float("nan")]), r"\['inner'\]\[0\] is nan.*finite numbers"),
        (lambda: create_model_spec(Net, inner={"$spec": 1}), r"has the key '\$spec'"),
        (lambda: create_model_spec(Net, inner={1: 1}), r"has the key 1; use strings"),
        (lambda: ModelSpec("torch.nn.Linear"), "target is 'torch.nn.Linear'; write"),
        (lambda: ModelSpec.from_json({"target": "a:b"}), "describes no model"),
    ],
)
def test_what_cannot_be_built_again_is_refused_by_name(make, message):
    """Lambdas, unknown or missing arguments and values that are no plain data are ValueErrors when the spec is made."""
    with pytest.raises(ModelSpecError, match=message) as caught:
        make()
    assert isinstance(caught.value, ValueError)


def test_a_local_class_is_refused():
    """A class that is defined inside a function has no name by which it could be imported."""

    class Local(nn.Module):
        pass

    with pytest.raises(ModelSpecError, match="Local.*cannot be imported by name"):
        create_model_spec(Local)


def test_a_class_that_hides_behind_another_name_is_refused(monkeypatch):
    """The name has to lead to the very class."""
    monkeypatch.setattr(sys.modules[__name__], "Net", make_net)
    with pytest.raises(ModelSpecError, match="give it under the name by which it can be imported"):
        create_model_spec(type("Net", (nn.Module,), {"__module__": __name__, "__qualname__": "Net"}))


@pytest.mark.parametrize("target", ["os:system", "builtins:eval", "evil_package.models:Net", "torch:load"])
def test_nothing_is_imported_that_was_not_allowed(target, tmp_path, monkeypatch):
    """A spec that names something else than torch.nn is refused with the remedy, and its module is never imported."""
    package = tmp_path / "evil_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('the code of the file ran')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelNotAllowedError, match=rf"{target}.*was not allowed; nothing of it was imported.*allow="):
        ModelSpec(target, {}).build()
    assert "evil_package" not in sys.modules


@pytest.mark.parametrize(
    "target", ["torch.nn.functional:relu", "torch.nn.init:normal_", "torch.nn.modules.linear:math"]
)
def test_of_torch_nn_only_modules_are_built(target):
    """Functions of torch.nn, and what its modules have imported, are no models."""
    with pytest.raises((ModelNotAllowedError, ModelImportError), match="no nn.Module|cannot be imported"):
        ModelSpec(target, {}).build()


def test_a_model_inside_needs_to_be_allowed_too():
    """What stands among the arguments is checked like the model itself, before anything is built."""
    spec = ModelSpec("torch.nn.modules.container:Sequential", {"args": [ModelSpec("os:getcwd", {})]})
    with pytest.raises(ModelNotAllowedError, match="os:getcwd"):
        spec.check()


@pytest.mark.parametrize("allow", [[Net], [__name__], [__name__.partition(".")[0]]])
def test_classes_and_prefixes_of_modules_can_be_allowed(allow):
    """A class itself, its module, or a package above it."""
    assert isinstance(create_model_spec(Net, inner=None).build(allow), Net)


@pytest.mark.parametrize("name", ["os.system", "system", "Path", "Net.run", "function", "Decoder"])
def test_a_prefix_allows_the_modules_own_models_only(name, tmp_path, monkeypatch):
    """What an allowed module has imported, its functions and other classes of it are not built, nor anything called."""
    (tmp_path / "mymodels.py").write_text(
        "import os\nfrom json import JSONDecoder as Decoder\nfrom os import system\nfrom pathlib import Path\n"
        "from torch import nn\n\nclass Net(nn.Module):\n    run = system\n\ndef function(command): system(command)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mymodels", raising=False)
    ran = tmp_path / "it ran"
    with pytest.raises(ModelNotAllowedError, match=rf"mymodels:{name} is no nn.Module .*itself: allow=\[{name}\]"):
        ModelSpec(f"mymodels:{name}", {"command": f"touch '{ran}'"}).build(["mymodels"])
    assert not ran.exists()
    assert type(ModelSpec("mymodels:Net", {}).build(["mymodels"])).__name__ == "Net"


def test_a_refusal_speaks_of_the_description():
    """A spec of one's own comes from no file, so the message does not speak of one."""
    with pytest.raises(ModelNotAllowedError) as caught:
        create_model_spec(Net, inner=None).build()
    assert str(caught.value).startswith(f"{__name__}:Net is no class of torch.nn and was not allowed")


def test_a_prefix_is_a_whole_part_of_a_name():
    """``torchvision`` is not allowed by ``torch``, nor is any module by half its name."""
    with pytest.raises(ModelNotAllowedError):
        ModelSpec("os.path:join", {}).check(["o"])
    with pytest.raises(ModelNotAllowedError):
        ModelSpec("osmosis:join", {}).check(["os"])


def test_a_function_can_build_a_model():
    """A function at the top of a module is a target like a class."""
    assert isinstance(create_model_spec(make_net, width=3).build([make_net]), nn.Linear)


@pytest.mark.parametrize("target", ["torch.nn.modules.linear:Lineal", "torch.nn.no_such_module:Linear"])
def test_what_is_not_there_any_more_is_an_import_error(target):
    """A class that its library has dropped is named, with what to do."""
    with pytest.raises(ModelImportError, match=rf"{target} cannot be imported any more") as caught:
        ModelSpec(target, {}).build()
    assert isinstance(caught.value, ImportError)


def test_a_class_given_by_the_caller_needs_no_import():
    """A class that moved, or stands in a script, is used as it is given."""
    moved = type("Net", (nn.Module,), {"__module__": "__main__", "__qualname__": "Net"})
    assert isinstance(ModelSpec("__main__:Net", {}).build([moved]), moved)
