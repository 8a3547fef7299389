"""Batches of any make, and what a loss may be."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, namedtuple
from dataclasses import dataclass

import pytest
import torch

from nvalchemi.training import TrainingStage
from nvalchemi.training.batches import move_to, scalar_loss

META = torch.device("meta")
Pair = namedtuple("Pair", ["x", "y"])
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


class Graph:
    """A batch with a method of its own, as graph libraries have."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def to(self, device):
        return Graph(self.x.to(device), self.y.to(device))


def pieces(kind, batch):
    if kind in ("dict", "mapping"):
        return batch["x"], batch["y"]
    return (batch.x, batch.y) if kind in ("namedtuple", "object") else (batch[0], batch[1])


MAKERS = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "dict": lambda x, y: {"x": x, "y": y},
    "mapping": lambda x, y: OrderedDict(x=x, y=y),
    "namedtuple": Pair,
    "object": Graph,
    "tensor": lambda x, y: torch.stack([x, y]),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", MAKERS)
def test_batches_of_every_make_are_trained_on(make_strategy, batches, kind, device):
    """Tensors, mappings, sequences, named tuples and objects with `.to(device)` can be trained and validated on."""
    made = [MAKERS[kind](x, y.expand(3, 2)) for x, y in batches]
    seen = []

    def forward(model, batch):
        x, y = pieces(kind, batch)
        seen.append((x.device.type, y.device.type))
        return model(x)

    strategy = make_strategy(
        training_fn=forward,
        loss_fn=lambda predictions, batch: (predictions - pieces(kind, batch)[1]).square().mean(),
        devices=device,
    )
    strategy.run(made)
    strategy.validate(made)
    assert strategy.step_count == 4
    assert set(seen) == {(device, device)}
    assert next(strategy.models["main"].parameters()).device.type == device


@pytest.mark.parametrize("kind", MAKERS)
def test_move_to_keeps_the_make(kind):
    """A batch that is moved keeps its make; all its tensors are on the device."""
    batch = MAKERS[kind](torch.zeros(2), torch.zeros(2))
    moved = move_to(batch, META)
    expected = dict if kind == "mapping" else type(batch)
    assert isinstance(moved, expected)
    assert all(tensor.device == META for tensor in pieces(kind, moved))
    assert pieces(kind, batch)[0].device.type == "cpu"


def test_move_to_goes_into_nested_batches_and_leaves_the_rest():
    """Nested batches are moved; numbers, strings, None, sizes and objects without `.to` stay what they are."""

    @dataclass
    class Notes:
        text: str

    notes = Notes("H2O")
    batch = {
        "graphs": [Pair(torch.zeros(1), "H"), Pair(torch.zeros(1), "O")],
        "shape": torch.zeros(2, 3).shape,
        "energy": (1.0, None, b"raw"),
        "user": UserDict(x=torch.zeros(1)),
        "notes": notes,
    }
    moved = move_to(batch, META)
    assert [pair.x.device for pair in moved["graphs"]] == [META, META]
    assert [pair.y for pair in moved["graphs"]] == ["H", "O"]
    assert moved["shape"] == (2, 3)
    assert moved["energy"] == (1.0, None, b"raw")
    assert moved["user"]["x"].device == META
    assert moved["notes"] is notes


def test_every_sequence_is_moved():
    """A sequence that is neither list nor tuple is a batch too."""
    moved = move_to(UserList([torch.zeros(1), torch.zeros(1)]), META)
    assert [tensor.device for tensor in moved] == [META, META]


def test_a_field_called_to_is_no_method():
    """A named tuple with a field called ``to`` is moved as a tuple."""
    Edge = namedtuple("Edge", ["source", "to"])
    moved = move_to(Edge(torch.zeros(1), torch.zeros(1)), META)
    assert (moved.source.device, moved.to.device) == (META, META)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (None, TypeError, r"loss_fn\(...\) is a NoneType \(None\); it must be a scalar tensor"),
        (0.5, TypeError, r"loss_fn\(...\) is a float \(0.5\); it must be a scalar tensor"),
        ({"mae": 1.5}, TypeError, r"loss_fn\(...\)\['mae'\] is a float \(1.5\); it must be a scalar tensor"),
        ({}, ValueError, r"empty mapping; give named scalar tensors"),
        (
            torch.ones(3, 1, requires_grad=True),
            ValueError,
            r"shape \(3, 1\); it must be a scalar: take its mean or sum",
        ),
        (torch.ones(0, requires_grad=True), ValueError, r"shape \(0,\); it must be a scalar"),
        ({"a": torch.ones(2)}, ValueError, r"loss_fn\(...\)\['a'\] has shape \(2,\); it must be a scalar"),
        (torch.ones(()), ValueError, r"no graph \(requires_grad is False\).*do not detach it"),
        ({"loss": torch.ones(())}, ValueError, r"no graph \(requires_grad is False\)"),
    ],
)
def test_a_loss_that_is_no_scalar_tensor_with_a_graph_is_refused(make_strategy, batches, value, error, message):
    """A loss that is no tensor, not scalar, or without gradient is refused with its value and the remedy."""
    strategy = make_strategy(loss_fn=lambda predictions, batch: value)
    strategy.setup()
    before = [p.detach().clone() for p in strategy.models["main"].parameters()]
    with pytest.raises(error, match=message):
        strategy.run(batches)
    assert (strategy.step_count, strategy.batch_count, strategy.epoch) == (0, 0, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, strategy.models["main"].parameters(), strict=True))


def test_a_loss_of_one_element_is_a_scalar():
    """A tensor of one element is taken as the scalar it is."""
    loss, parts = scalar_loss(torch.full((1, 1), 3.0, requires_grad=True), training=True)
    assert loss.shape == ()
    assert loss.item() == 3.0
    assert parts == {}


def test_named_scalars_are_summed_unless_one_is_called_loss():
    """Of named scalars ``"loss"`` is trained on, or else their sum; the parts are kept."""
    one, two = torch.tensor(1.0, requires_grad=True), torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    loss, parts = scalar_loss({"a": one, "b": two}, training=True)
    assert loss.item() == 3.0
    assert set(parts) == {"a", "b"}
    loss, parts = scalar_loss({"loss": one, "mae": two.detach()}, training=True)
    assert float(loss) == 1.0
    assert set(parts) == {"loss", "mae"}


def test_a_loss_without_a_graph_is_a_loss_where_nothing_is_trained():
    """Where nothing is trained a loss needs no graph."""
    assert float(scalar_loss(torch.tensor(2.0), training=False)[0]) == 2.0


@pytest.mark.parametrize(
    ("devices", "expected"), [("cpu", "cpu"), (torch.device("cpu"), "cpu"), (["cpu", "meta"], "cpu")]
)
def test_devices_are_one_or_several(make_strategy, batches, devices, expected):
    """`devices` is a device, its name, or a sequence of which a process alone takes the first."""
    strategy = make_strategy(devices=devices)
    assert strategy.train_batch(batches[0]).device == torch.device(expected)


def test_models_and_batches_go_to_the_device(make_strategy, plain, batches):
    """Models are on the device before SETUP; every batch is asked to go there, in training and in validation."""
    seen, asked = [], []
    spy = plain(lambda ctx, stage: seen.append((ctx.device, ctx.model.weight.device)), TrainingStage.SETUP)
    make_strategy(spy, devices="meta").setup()
    assert seen == [(META, META)]

    class Asked(tuple):
        def to(self, device):
            asked.append(device)
            return self

    strategy = make_strategy(devices="cpu")
    strategy.run([Asked(batches[0])])
    strategy.validate([Asked(batches[0])])
    assert asked == [torch.device("cpu")] * 2


def test_without_devices_models_stay_where_they_are(make_strategy, plain):
    """Without `devices` batches go to where the models are."""
    seen = []
    spy = plain(lambda ctx, stage: seen.append((ctx.device, ctx.model.weight.device)), TrainingStage.SETUP)
    make_strategy(spy, models=torch.nn.Linear(2, 1, device="meta")).setup()
    assert seen == [(META, META)]


@pytest.mark.parametrize(("devices", "message"), [([], r"devices is empty; give a device"), ("gpu", r"gpu")])
def test_wrong_devices_are_refused_when_they_are_given(make_strategy, devices, message):
    """No device, or one that does not exist, is refused when the strategy is made, not at its first batch."""
    with pytest.raises((ValueError, RuntimeError), match=message):
        make_strategy(devices=devices)
