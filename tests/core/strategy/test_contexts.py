"""What the context of a batch holds at which stage, and how long."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch

from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook

S = TrainingStage


class Halve(TrainingUpdateHook):
    reads_grad = False

    def transform_loss(self, ctx, loss):
        return loss * 0.5


def test_the_loss_is_none_then_live_then_detached(make_strategy, plain, batches):
    """`ctx.loss` is None before it exists, live from AFTER_LOSS to DO_BACKWARD, detached from AFTER_BACKWARD on."""
    seen = {}

    def look(ctx, stage):
        seen[stage.name] = "none" if ctx.loss is None else "live" if ctx.loss.requires_grad else "detached"

    stages = [stage for stage in S if stage not in (S.DO_BACKWARD, S.DO_OPTIMIZER_STEP)]
    make_strategy(plain(look, *stages)).train_batch(batches[0])
    del seen["SETUP"]
    assert seen == {
        "BEFORE_BATCH": "none",
        "BEFORE_FORWARD": "none",
        "AFTER_FORWARD": "none",
        "BEFORE_LOSS": "none",
        "AFTER_LOSS": "live",
        "BEFORE_BACKWARD": "live",
        "AFTER_BACKWARD": "detached",
        "BEFORE_OPTIMIZER_STEP": "detached",
        "AFTER_OPTIMIZER_STEP": "detached",
        "AFTER_BATCH": "detached",
    }


def test_the_loss_after_backward_is_what_loss_fn_returned(make_strategy, plain, batches, square_error):
    """From AFTER_BACKWARD on `ctx.loss` is the value of `loss_fn`, before any update hook transformed it."""
    seen, returned = [], []

    def loss_fn(predictions, batch):
        returned.append(square_error(predictions, batch))
        return returned[-1]

    spy = plain(lambda ctx, stage: seen.append(ctx.loss), S.AFTER_BACKWARD, S.AFTER_BATCH)
    ctx = make_strategy(spy, Halve(), loss_fn=loss_fn).train_batch(batches[0])
    assert [float(loss) for loss in [*seen, ctx.loss]] == [float(returned[0])] * 3


def test_named_losses_are_in_the_context_and_detached_after_the_batch(make_strategy, plain, batches, square_error):
    """The parts of a named loss are `ctx.losses`: live at AFTER_LOSS, without a graph once the batch is over."""
    seen = {}
    spy = plain(lambda ctx, stage: seen.update(ctx.losses), S.AFTER_LOSS)

    def loss_fn(predictions, batch):
        energy = square_error(predictions, batch)
        return {"energy": energy, "size": predictions.square().mean()}

    ctx = make_strategy(spy, loss_fn=loss_fn).train_batch(batches[0])
    assert set(ctx.losses) == {"energy", "size"}
    assert all(value.requires_grad for value in seen.values())
    assert not any(value.requires_grad for value in ctx.losses.values())
    assert float(ctx.loss) == pytest.approx(float(ctx.losses["energy"] + ctx.losses["size"]))


def test_one_context_a_batch_is_shared_by_all_its_hooks(make_strategy, plain, trace, batches):
    """Plain hooks and update hooks of a batch get one and the same context; the next batch gets another."""
    seen = []

    class Look(trace):
        def __call__(self, ctx, stage, will_skip=False):
            if stage is not S.SETUP:
                seen.append(ctx)
            return True, ctx.loss

    stages = [stage for stage in S if not stage.name.startswith("DO_") and stage is not S.SETUP]
    strategy = make_strategy(plain(lambda ctx, stage: seen.append(ctx), *stages), Look())
    first = strategy.train_batch(batches[0])
    assert len(seen) == 14
    assert all(ctx is first for ctx in seen)
    seen.clear()
    second = strategy.train_batch(batches[1])
    assert second is not first
    assert all(ctx is second for ctx in seen)


def test_a_context_knows_the_run(make_strategy, batches):
    """The context holds batch, model, models, optimizers, schedulers, device, rank, and the strategy as `workflow`."""
    strategy = make_strategy()
    ctx = strategy.train_batch(batches[0])
    assert ctx.batch[0] is batches[0][0]
    assert ctx.model is strategy.models["main"]
    assert ctx.models["main"] is ctx.model
    assert list(ctx.optimizers) == strategy.optimizers
    assert list(ctx.lr_schedulers) == strategy.lr_schedulers
    assert ctx.device == torch.device("cpu")
    assert ctx.global_rank == 0
    assert ctx.workflow is strategy
    assert ctx.grad_scaler is None
    assert ctx.window_complete is True


def test_plain_hooks_can_ask_for_true_gradients(make_strategy, plain, batches):
    """At BEFORE_OPTIMIZER_STEP `ctx.gradients` and `ctx.grad_norm` are those of the batch."""
    seen = []

    def look(ctx, stage):
        seen.append((dict(ctx.gradients), ctx.grad_norm))

    strategy = make_strategy(plain(look, S.BEFORE_OPTIMIZER_STEP))
    strategy.train_batch(batches[0])
    gradients, norm = seen[0]
    assert set(gradients) == {"weight", "bias"}
    flat = torch.cat([p.grad.flatten() for p in strategy.models["main"].parameters()])
    torch.testing.assert_close(norm, flat.norm())


def test_a_batch_is_let_go_before_the_next_one_is_computed(make_strategy):
    """The context of a batch is dropped afterwards: its tensors are free while the next batch is computed."""
    alive, refs = [], []

    def loader():
        for _ in range(3):
            x = torch.randn(3, 2)
            refs.append(weakref.ref(x))
            yield x, torch.randn(3, 1)
            del x

    def forward(model, batch):
        alive.append([ref() is not None for ref in refs])
        return model(batch[0])

    make_strategy(training_fn=forward).run(loader())
    assert alive == [[True], [False, True], [False, False, True]]


def test_a_context_opened_for_the_batch_spans_it_and_no_more(make_strategy, plain, batches):
    """What `ctx.enter_batch_context` opened is open until the batch ends, or until the hook closes it."""
    opened, seen = [], []

    def start(ctx, stage):
        opened.append(ctx.enter_batch_context(torch.autocast("cpu", torch.bfloat16)))

    def look(ctx, stage):
        seen.append((stage.name, torch.is_autocast_enabled("cpu")))
        if stage is S.AFTER_LOSS and ctx.batch_count == 1:
            opened[-1].close()

    watch = plain(look, S.AFTER_FORWARD, S.AFTER_LOSS, S.AFTER_BATCH, S.AFTER_EPOCH)
    make_strategy(plain(start, S.BEFORE_FORWARD), watch).run(batches[:2])
    assert seen == [
        ("AFTER_FORWARD", True),
        ("AFTER_LOSS", True),
        ("AFTER_BATCH", True),
        ("AFTER_FORWARD", True),
        ("AFTER_LOSS", True),
        ("AFTER_BATCH", False),
        ("AFTER_EPOCH", False),
    ]


class Remembered(torch.autograd.Function):
    """Saves a tensor in the graph, and tells who asks for a weak reference to it."""

    refs: list

    @staticmethod
    def forward(ctx, x):
        saved = x.detach().clone()
        ctx.held = saved
        Remembered.refs.append(weakref.ref(saved))
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.fixture
def remembered():
    """A forward whose graph holds tensors, and weak references to them."""
    Remembered.refs = []
    return lambda model, batch: Remembered.apply(model(batch[0]))


@pytest.fixture
def uncollected():
    """No help from the garbage collector: what is free is free because nobody holds it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("case", ["step", "veto", "named", "plain backward", "no backward"])
def test_no_graph_outlives_its_batch(make_strategy, plain, veto, batches, remembered, square_error, case):
    """A tensor saved in the graph is free when the batch is over, though the context and its losses are kept."""
    hooks = {
        "veto": [veto()],
        "plain backward": [plain(lambda ctx, stage: ctx.loss.backward(), S.DO_BACKWARD)],
        "no backward": [plain(lambda ctx, stage: None, S.DO_BACKWARD)],
    }

    def named(predictions, batch):
        return {"a": square_error(predictions, batch), "b": predictions.sum()}

    loss_fn = named if case == "named" else square_error
    strategy = make_strategy(*hooks.get(case, []), training_fn=remembered, loss_fn=loss_fn)
    kept = [strategy.train_batch(batch) for batch in batches[:2]]
    assert [ref() for ref in Remembered.refs] == [None, None]
    assert all(ctx.loss.grad_fn is None for ctx in kept)


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("case", ["one loss", "named", "plain backward"])
def test_the_graph_is_free_once_backward_has_run(make_strategy, plain, batches, remembered, square_error, case):
    """From AFTER_BACKWARD on nobody holds the graph any more, so its memory is there for the step."""
    seen = []
    spy = plain(lambda ctx, stage: seen.extend(ref() for ref in Remembered.refs), S.AFTER_BACKWARD)
    owner = plain(lambda ctx, stage: ctx.loss.backward(), S.DO_BACKWARD)

    def named(predictions, batch):
        return {"a": square_error(predictions, batch), "b": predictions.sum()}

    hooks = [spy, owner] if case == "plain backward" else [spy]
    loss_fn = named if case != "one loss" else square_error
    make_strategy(*hooks, training_fn=remembered, loss_fn=loss_fn).train_batch(batches[0])
    assert seen == [None]


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(
    "stage",
    [S.AFTER_FORWARD, S.AFTER_LOSS, S.BEFORE_BACKWARD, S.AFTER_BACKWARD, S.AFTER_OPTIMIZER_STEP, S.AFTER_BATCH],
)
def test_no_graph_outlives_a_batch_in_which_a_hook_raised(make_strategy, plain, batches, remembered, stage):
    """A tensor saved in the graph is free when a hook has raised, though its context was kept."""
    kept = []

    def fail(ctx, stage):
        kept.append(ctx)
        raise RuntimeError("from the hook")

    strategy = make_strategy(plain(fail, stage), training_fn=remembered)
    with contextlib.suppress(RuntimeError):
        strategy.run(batches)
    assert [ref() for ref in Remembered.refs] == [None]
    assert kept[0].loss is None or kept[0].loss.grad_fn is None


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("method", ["transform_loss", "before_optimizer_step", "after_optimizer_step", "settled"])
def test_no_graph_outlives_a_batch_in_which_an_update_hook_raised(make_strategy, batches, remembered, method):
    """A tensor saved in the graph is free when an update hook has raised, whichever method it was."""

    def fail(self, ctx, *args, **kwargs):
        raise RuntimeError("from the update hook")

    strategy = make_strategy(type("Failing", (TrainingUpdateHook,), {method: fail})(), training_fn=remembered)
    with contextlib.suppress(RuntimeError):
        strategy.run(batches)
    assert [ref() for ref in Remembered.refs] == [None]
