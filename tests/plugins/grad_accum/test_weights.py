"""Micro-batches of different sizes make the step of one big batch, however it was cut."""

from __future__ import annotations

import pickle
from fractions import Fraction

import pytest
import torch
from torch import nn

from nvalchemi.training import GradientAccumulationHook, OptimizerConfig, TrainingStrategy
from nvalchemi_hooks_grad_accum.weights import weight_of


def samples(batch):
    """How many samples a batch has."""
    return len(batch[0])


class Graphs:
    """A batch that says how many atoms each of its graphs has."""

    def __init__(self, x, y):
        self.x, self.y = x, y
        self.atoms = torch.ones(len(x), dtype=torch.long)

    def to(self, device):
        return self


MAKES = {
    "function": (samples, lambda x, y: (x, y)),
    "import path": ("operator:length_hint", lambda x, y: Graphed(x, y)),
    "entry": ("n", lambda x, y: {0: x, 1: y, "n": len(x)}),
    "attribute": ("atoms", Graphs),
}


class Graphed(tuple):
    """A pair whose length hint is that of its first part."""

    def __new__(cls, x, y):
        return super().__new__(cls, (x, y))

    def __length_hint__(self):
        return len(self[0])

    def to(self, device):
        return self


def parts(batch):
    return (batch.x, batch.y) if isinstance(batch, Graphs) else (batch[0], batch[1])


def loss_fn(predictions, batch):
    return (predictions - parts(batch)[1]).square().mean()


CUTS = [[8, 8, 8, 8], [1, 3, 12, 16], [5, 27], [31, 1], [7, 7, 7, 7, 4], [1] * 32]


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_any_cut_equals_one_big_batch(make_strategy, make_model, weights_of, cut, optimizer):
    """Over 50 steps weights are those of training on the whole batch, to 1e-6, for windows that are full and not."""
    generator = torch.Generator().manual_seed(3)
    data = [torch.randn(32, 3, generator=generator) for _ in range(50)]
    whole = [(x, x.sum(1, keepdim=True).sin()) for x in data]
    cuts = [list(zip(x.split(cut), y.split(cut), strict=True)) for x, y in whole]
    options = {"optimizer": optimizer, "lr": 0.01, "num_epochs": None, "num_steps": 1}
    accumulated = make_strategy(accumulate={"steps": 6 if len(cut) < 6 else 32, "weight": samples}, **options)
    big = make_strategy(accumulate={"steps": 1}, **options)
    for micro, batch in zip(cuts, whole, strict=True):
        for place, part in enumerate(micro):
            accumulated.train_batch(part, is_last_batch=place == len(micro) - 1)
        big.train_batch(batch)
    assert accumulated.step_count == big.step_count == 50
    torch.testing.assert_close(weights_of(accumulated), weights_of(big), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("weight", "make"), [pytest.param(*one, id=name) for name, one in MAKES.items()])
def test_a_weight_can_be_given_in_several_ways(make_model, make_batches, by_hand, weights_of, weight, make):
    """A function, its import path, an entry or an attribute of the batch: all weigh micro-batches alike."""
    if weight == "operator:length_hint":
        weight = f"{__name__}:hinted"
    batches = make_batches(1, 3, 4)
    strategy = TrainingStrategy(
        models=make_model(),
        optimizer_configs=OptimizerConfig(optimizer_cls="SGD", optimizer_kwargs={"lr": 0.1}),
        training_fn=lambda model, batch: model(parts(batch)[0]),
        loss_fn=loss_fn,
        hooks=[GradientAccumulationHook(steps=3, weight=weight)],
        num_epochs=1,
        progress=False,
    )
    strategy.run([make(x, y) for x, y in batches])
    expected = by_hand([[(8 / len(batch[0]), batch) for batch in batches]])
    torch.testing.assert_close(weights_of(strategy), weights_of(expected), rtol=1e-6, atol=1e-7)


def test_sizes_one_and_three():
    """Per-sample gradients 4 and 0, 0, 0 in micro-batches of 1 and 3: the step is 1, the mean of means would be 2."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    strategy = TrainingStrategy(
        models=model,
        optimizer_configs=OptimizerConfig(optimizer_cls="SGD", optimizer_kwargs={"lr": 1.0}),
        loss_fn=lambda predictions, batch: predictions.mean(),
        hooks=[GradientAccumulationHook(steps=2, weight=len)],
        num_epochs=1,
        progress=False,
    )
    strategy.run([torch.tensor([[4.0]]), torch.zeros(3, 1)])
    assert model.weight.item() == -1.0


def test_equal_weights_change_no_bit(make_strategy, make_batches, weights_of):
    """Where every batch weighs the same power of two, a full window has the bits of one without weights."""
    batches = make_batches(*8 * [4])
    weighted, plain = make_strategy(accumulate={"steps": 4, "weight": samples}), make_strategy()
    weighted.run(batches)
    plain.run(batches)
    assert torch.equal(weights_of(weighted), weights_of(plain))


def test_large_weights_do_not_make_gradients_large(make_strategy, make_batches, plain):
    """Millions of atoms in a batch leave what lies in .grad as large as the gradient: low precision has room for it."""
    norms = []

    def look(ctx):
        norms.append(torch.cat([p.grad.flatten() for p in ctx.model.parameters()]).norm().item())

    from nvalchemi.training import TrainingStage

    for weight in (samples, millions):
        hook = plain(TrainingStage.AFTER_BACKWARD, look)
        make_strategy(hook, accumulate={"steps": 2, "weight": weight}, lr=0.0).run(make_batches(3, 5))
    assert norms[2:] == pytest.approx(norms[:2], rel=1.0)


def millions(batch):
    """Many atoms a sample."""
    return 3_000_000 * len(batch[0])


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        (0, ValueError, "the weight of a batch is 0; it must be finite and above 0"),
        (float("nan"), ValueError, "is nan; it must be finite"),
        (float("inf"), ValueError, "is inf"),
        (-2, ValueError, "is -2"),
        (True, TypeError, "is True; give a number"),
        ("many", TypeError, "is 'many'; give a number"),
        (torch.ones(2, 2), TypeError, r"a tensor of shape \(2, 2\)"),
        (torch.tensor(-1.0), ValueError, "is -1.0"),
    ],
)
def test_a_weight_that_is_no_number_above_zero_is_refused(given, kind, words):
    """The message says what the weight of the batch was."""
    with pytest.raises(kind, match=words):
        weight_of(None, lambda batch: given)


@pytest.mark.parametrize("given", [3, 3.0, Fraction(3), torch.tensor(3), torch.tensor([1, 2])])
def test_a_weight_is_any_real_number(given):
    """Whatever says that it is a real number is one, as the scalars of numpy do; a tensor is added up."""
    weight = weight_of(None, lambda batch: given)
    assert (weight, type(weight)) == (3.0, float)


@pytest.mark.parametrize(
    ("weight", "kind", "words"),
    [
        ("no.such:function", ValueError, "there is no such function"),
        ("operator:no_such", ValueError, "there is no such function"),
        (":name", ValueError, "there is no such function"),
        (lambda batch: 1, ValueError, "cannot be carried to another process"),
        (3, TypeError, "weight is 3; give a function"),
        ("", TypeError, "weight is ''; give a function"),
        ("operator:__name__", TypeError, "give a function"),
    ],
)
def test_a_weight_that_cannot_be_used_is_refused_at_once(weight, kind, words):
    """What cannot be called, imported or pickled is named when the hook is made."""
    with pytest.raises(kind, match=words):
        GradientAccumulationHook(steps=2, weight=weight)


def test_a_batch_without_the_named_entry_is_named(make_strategy, make_batches):
    """The message says what the batch is and what it lacks."""
    with pytest.raises(ValueError, match=r"weight is 'atoms', but the batch, a tuple, has no entry and no attribute"):
        make_strategy(accumulate={"steps": 2, "weight": "atoms"}).run(make_batches(2, 2))


@pytest.mark.parametrize("weight", [None, samples, "atoms", "operator:length_hint"])
def test_it_pickles_with_its_weight(weight):
    """A hook can be carried to another process whatever weighs its batches."""
    assert repr(pickle.loads(pickle.dumps(GradientAccumulationHook(steps=2, weight=weight)))).startswith("Gradient")


def hinted(batch):
    """The length hint of a batch."""
    return batch.__length_hint__()
