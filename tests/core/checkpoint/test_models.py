"""Models saved with their descriptions, and built again by whoever trusts them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from nvalchemi.errors import CheckpointFormatError, CheckpointMismatchError, ModelSpecError, NotPlainDataError
from nvalchemi.training import create_model_spec, load_checkpoint, load_training, save_checkpoint, save_training
from nvalchemi.training.checkpoint.reading import open_sections

SPEC = create_model_spec(nn.Linear, in_features=3, out_features=2)


class Tied(nn.Module):
    """Two names for one weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.weight = self.a.weight


class Extra(nn.Module):
    """Keeps something in its state that is no plain data."""

    def get_extra_state(self):
        return object()


class Table(nn.Module):
    """Makes the tensor of its extra state anew whenever it is asked."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def get_extra_state(self):
        return torch.full((1000,), self.value)


class Growing(nn.Module):
    """Has another shape each time the class attribute is changed."""

    width = 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(self.width))


def test_models_come_back_with_their_weights(tmp_path):
    """Every model is rebuilt from its spec, its weights equal bit for bit, and metadata is given back."""
    models = {"main": (SPEC.build(), SPEC), "teacher": (SPEC.build(), SPEC)}
    save_checkpoint(tmp_path, models=models, metadata={"energy_unit": "eV"})
    loaded = load_checkpoint(tmp_path)
    assert loaded.metadata == {"energy_unit": "eV"}
    for name, (module, spec) in models.items():
        again, its_spec = loaded.models[name]
        assert its_spec == spec
        assert torch.equal(again.weight, module.weight)
        assert again.weight.requires_grad


METADATA = {
    "keys": ({"loss": {1: 0.5, 2: 0.4, 10: 0.3}}, r"metadata\['loss'\] has the key 1, a int, .* use strings"),
    "tuple": ({"shape": [1, (2, 3)]}, r"metadata\['shape'\]\[1\] is a tuple .*list\(x\) for a tuple"),
    "tensor": ({"best": torch.ones(1)}, r"metadata\['best'\] is a Tensor .*x.tolist\(\) for a tensor"),
    "set": ({"elements": {"H"}}, r"metadata\['elements'\] is a set"),
    "bytes": ({"hash": b"x"}, r"metadata\['hash'\] is a bytes"),
}


@pytest.mark.parametrize("what", METADATA)
def test_metadata_that_json_would_not_give_back_is_refused_when_it_is_saved(tmp_path, what):
    """What would come back as something else, or not at all, is named with its place, and no file is written."""
    metadata, message = METADATA[what]
    with pytest.raises(NotPlainDataError, match=message):
        save_checkpoint(tmp_path / "root", models={"main": (SPEC.build(), SPEC)}, metadata=metadata)
    assert not (tmp_path / "root").exists()


def test_metadata_of_any_depth_comes_back_equal(tmp_path):
    """JSON data is given back as it was, whatever the order of its keys."""
    metadata = {"b": [1, 2.5, None, True, {"10": "x", "9": []}], "a": {"\u00e9\ud800": float("inf")}}
    save_checkpoint(tmp_path, models={"main": (SPEC.build(), SPEC)}, metadata=metadata)
    assert load_checkpoint(tmp_path).metadata == metadata


def test_wrappers_of_torch_are_taken_off(tmp_path):
    """A compiled or DataParallel model is saved under the names of the bare one."""
    module = SPEC.build()
    save_checkpoint(tmp_path, models={"main": (torch.compile(nn.DataParallel(module), backend="eager"), SPEC)})
    assert torch.equal(load_checkpoint(tmp_path).models["main"][0].weight, module.weight)


def test_tied_weights_stay_tied_and_are_written_once(tmp_path):
    """Two names for one tensor take the room of one in the file."""
    spec = create_model_spec(Tied)
    save_checkpoint(tmp_path, models={"main": (spec.build([Tied]), spec)})
    with open_sections(tmp_path, kind="models") as (sections, _):
        state = sections["models/main"]
    assert state["a.weight"].data_ptr() == state["b.weight"].data_ptr()
    module, _ = load_checkpoint(tmp_path, allow=[Tied]).models["main"]
    assert module.a.weight is module.b.weight


def test_neither_saving_nor_loading_moves_the_random_numbers(tmp_path):
    """Building a model draws its first weights; whoever loads a checkpoint does not notice."""
    model = SPEC.build()
    before = torch.get_rng_state()
    save_checkpoint(tmp_path, models={"main": (model, SPEC)})
    load_checkpoint(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_wrapper_of_the_callers_is_refused_when_it_is_saved(tmp_path):
    """An AveragedModel is not what its spec builds: the message says to give its module."""
    with pytest.raises(
        ModelSpecError, match=r"'ema'.*is a AveragedModel, but its spec builds .*Linear.*give its .module"
    ):
        save_checkpoint(tmp_path, models={"ema": (AveragedModel(SPEC.build()), SPEC)})
    assert not (tmp_path / "manifest.json").exists()


@pytest.mark.parametrize(
    ("pair", "message"), [(SPEC, "give .module, spec."), ((nn.Linear(1, 1), "Linear"), "a str for its")]
)
def test_what_is_no_pair_is_refused(tmp_path, pair, message):
    """Anything but (module, spec) is a TypeError with the name of the model."""
    with pytest.raises(TypeError, match=rf"models\['main'\].*{message}"):
        save_checkpoint(tmp_path, models={"main": pair})


def test_state_that_is_no_plain_data_is_refused_when_it_is_saved(tmp_path):
    """An extra state that could never be loaded is named at once."""
    with pytest.raises(NotPlainDataError, match=r"models/main\['_extra_state'\] is a object"):
        save_checkpoint(tmp_path, models={"main": (Extra(), create_model_spec(Extra))})


def test_extra_states_that_are_made_anew_are_not_mixed_up(make_strategy):
    """Models whose extra state is a fresh tensor each have their own in the state of a run."""
    names = ["main", "a", "b", "c"]
    models = {name: nn.Sequential(nn.Linear(6, 1), Table(float(place))) for place, name in enumerate(names)}
    state = make_strategy(models=models).state_dict()["models"]
    assert [float(state[name]["1._extra_state"][0]) for name in names] == [0, 1, 2, 3]


def test_a_model_that_has_changed_since_is_refused_by_shape(tmp_path, monkeypatch):
    """What was built has another shape than what was saved: model, tensor and both shapes are named."""
    spec = create_model_spec(Growing)
    save_checkpoint(tmp_path, models={"main": (Growing(), spec)})
    monkeypatch.setattr(Growing, "width", 3)
    with pytest.raises(
        CheckpointMismatchError, match=r"main.weight is float32 of shape \(2,\).*but float32 of shape \(3,\)"
    ):
        load_checkpoint(tmp_path, allow=[Growing])


def test_each_kind_of_checkpoint_says_how_it_is_loaded(tmp_path, make_strategy):
    """A checkpoint of models is no run, and a run is none of models; each message names the other function."""
    save_checkpoint(tmp_path / "models", models={"main": (SPEC.build(), SPEC)})
    save_training(tmp_path / "run", make_strategy())
    with pytest.raises(CheckpointFormatError, match="load it by load_checkpoint"):
        load_training(tmp_path / "models", make_strategy())
    with pytest.raises(CheckpointFormatError, match="load it by load_training"):
        load_checkpoint(tmp_path / "run")
