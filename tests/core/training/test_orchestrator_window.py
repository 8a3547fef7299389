"""Windows of several batches: nothing happens until the last of them."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from nvalchemi.training.hooks import AlwaysVeto, TrainingUpdateHook


class Accumulate(TrainingUpdateHook):
    """Steps every `steps` batches."""

    priority = 10
    reads_grad = False

    def __init__(self, steps):
        self.steps = steps

    def before_batch(self, ctx, *, will_skip):
        ctx.window_complete = (ctx.batch_count + 1) % self.steps == 0
        return ctx.batch_count % self.steps == 0

    def transform_loss(self, ctx, loss):
        return loss / self.steps


class Counts(TrainingUpdateHook):
    """Counts the calls of its stage methods."""

    def __init__(self):
        self.calls = []

    def before_optimizer_step(self, ctx, *, will_skip):
        self.calls.append("before")
        return True

    def after_optimizer_step(self, ctx, *, skipped):
        self.calls.append(("after", skipped))

    def settled(self, ctx, *, skipped):
        self.calls.append(("settled", skipped))


@pytest.mark.parametrize("kind", ["none", "counting_scaler", "public_scaler", "folding_scaler"])
def test_an_open_window_does_nothing(make_loop, scale, request, kind):
    """``ctx.window_complete`` False means: no unscale, no step, no scheduler, no scaler update, gradients kept."""
    scaler = None if kind == "none" else request.getfixturevalue(kind)()
    loop = make_loop(*([scale(scaler)] if scaler else []), schedulers=lambda os: [StepLR(os[0], 1, 0.5)])
    ctx = loop.batch(1.0, window_complete=False)
    assert loop.values == [1.0]
    assert loop.grads == [8.0 if scaler else 1.0]
    assert loop.optimizers[0].param_groups[0]["lr"] == 1.0
    assert getattr(scaler, "log", []) == []
    assert getattr(scaler, "closed", []) == []
    assert getattr(scaler, "updates", 0) == 0
    assert ctx.step_skipped


def test_an_open_window_is_no_veto(make_loop):
    """An open window is a skipped step, but no veto."""
    loop = make_loop()
    loop.batch(1.0, window_complete=False)
    outcome = loop.orchestrator.last_outcome
    assert loop.orchestrator.optimizer_step_skipped
    assert (outcome.window_open, outcome.vetoes, outcome.found_inf) == (True, (), False)


def test_children_are_called_with_will_skip(make_loop, recorder):
    """In an open window children are called at DO_OPTIMIZER_STEP with ``will_skip=True``, the first one too."""
    log = []
    make_loop(recorder("a", log), recorder("b", log)).batch(1.0, window_complete=False)
    assert [entry for entry in log if entry[1] == "DO_OPTIMIZER_STEP"] == [
        ("a", "DO_OPTIMIZER_STEP", True),
        ("b", "DO_OPTIMIZER_STEP", True),
    ]
    assert ("a", "AFTER_OPTIMIZER_STEP", True) in log


def test_before_optimizer_step_and_settled_wait_for_the_last_batch(make_loop):
    """`before_optimizer_step` is not called in an open window; `settled` is called once a complete window."""
    counts = Counts()
    loop = make_loop(Accumulate(3), counts)
    for _ in range(3):
        loop.batch(1.0)
    assert counts.calls == [("after", True), ("after", True), "before", ("after", False), ("settled", False)]


@pytest.mark.parametrize("vetoed", [False, True])
def test_settled_is_called_once_for_every_window(make_loop, vetoed):
    """Over several windows `settled` is called as often as a step was attempted, vetoed or not."""
    counts = Counts()
    loop = make_loop(Accumulate(2), counts, *([AlwaysVeto()] if vetoed else []))
    for _ in range(6):
        loop.batch(1.0)
    assert [call for call in counts.calls if call[0] == "settled"] == [("settled", vetoed)] * 3


@pytest.mark.parametrize("kind", ["none", "counting_scaler", "public_scaler", "folding_scaler"])
def test_accumulation_then_one_step(make_loop, scale, divide, request, kind):
    """Several batches are one step on the mean of their gradients, divided once, with any scaler."""
    scaler = None if kind == "none" else request.getfixturevalue(kind)()
    loop = make_loop(Accumulate(4), divide(2.0), *([scale(scaler)] if scaler else []))
    for gradient in (1.0, 2.0, 3.0, 10.0, 4.0, 4.0, 4.0, 4.0):
        loop.batch(gradient)
    assert loop.steps == 2
    assert loop.values == [1.0 - 16.0 / 4 / 2 - 4.0 / 2]


def test_the_scheduler_moves_once_a_window(make_loop):
    """One move of the scheduler an executed step: four batches a window, eight batches, lr 0.25."""
    loop = make_loop(Accumulate(4), schedulers=lambda os: [StepLR(os[0], 1, 0.5)])
    for _ in range(8):
        loop.batch(1.0)
    assert loop.optimizers[0].param_groups[0]["lr"] == 0.25


def test_a_torch_scaler_is_driven_once_a_window(make_loop, scale, counting_scaler):
    """At most one ``unscale_`` an optimizer and window, and one ``update`` a window, however many batches it has."""
    scaler = counting_scaler()
    loop = make_loop(Accumulate(3), scale(scaler))
    for _ in range(6):
        loop.batch(1.0)
    assert scaler.log == ["unscale_", "step", "update"] * 2


def test_the_scale_never_changes_inside_a_window(make_loop, scale, counting_scaler):
    """An inf in the first batch of a window backs the scale off after its last, not before."""
    scaler = counting_scaler(growth_interval=1)
    loop = make_loop(Accumulate(3), scale(scaler))
    scales = []
    for gradient in (float("inf"), 1.0, 1.0, 1.0, 1.0, 1.0):
        loop.batch(gradient)
        scales.append(scaler.get_scale())
    assert scales == [8.0, 8.0, 4.0, 4.0, 4.0, 8.0]
    assert loop.steps == 1


def test_a_vetoed_window_is_over(make_loop, veto):
    """A veto on the last batch of a window ends it: the next window starts from nothing."""
    loop = make_loop(Accumulate(2), veto(1))
    for gradient in (100.0, 100.0, 1.0, 3.0):
        loop.batch(gradient)
    assert loop.values == [1.0 - 2.0]


def test_the_norm_of_a_window_is_that_of_its_sum(make_loop, scale, folding_scaler):
    """``ctx.grad_norm`` of a window is that of what all its batches left, and of each batch so far while it is open."""
    loop = make_loop(Accumulate(2), scale(folding_scaler()), weights=(1.0, 1.0))
    norms = []
    for gradients in ((6.0, 0.0), (0.0, 8.0)):
        ctx = loop.batch(*gradients)
        norms.append(ctx.grad_norm.item())
    assert norms == [3.0, 5.0]


def test_ctx_window_complete_is_true_by_default(make_loop):
    """``ctx.window_complete`` is True unless somebody who accumulates says otherwise."""
    loop = make_loop()
    assert loop.context().window_complete is True
    loop.batch(torch.tensor(1.0))
    assert loop.values == [0.0]


@pytest.mark.parametrize("kind", ["counting_scaler", "public_scaler", "folding_scaler"])
def test_gradients_without_their_scale_are_not_added_to(make_loop, recorder, scale, request, kind):
    """Keeping gradients whose loss scale is divided out already is refused, with what an accumulating hook does."""
    loop = make_loop(recorder(votes={"BEFORE_BATCH": False}), scale(request.getfixturevalue(kind)()))
    loop.batch(1.0)
    with pytest.raises(TypeError, match="loss scale is divided out.*ctx.window_complete = False"):
        loop.batch(1.0)
    assert loop.values == [0.0]


@pytest.mark.parametrize("kind", ["counting_scaler", "public_scaler", "folding_scaler"])
def test_vetoed_gradients_may_be_kept_under_a_scale(make_loop, recorder, scale, veto, request, kind):
    """Gradients of a vetoed step that were kept are added to under the same scale, and stepped on together."""
    loop = make_loop(recorder(votes={"BEFORE_BATCH": False}), scale(request.getfixturevalue(kind)()), veto(0))
    loop.batch(1.0)
    loop.batch(2.0)
    assert loop.values == [1.0 - 3.0]
