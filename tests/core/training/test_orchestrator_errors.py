"""What is left behind, and what is said, when a child raises."""

from __future__ import annotations

import pytest
import torch

from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import PassThrough, TrainingUpdateHook, TrainingUpdateOrchestrator

STAGES = ["SETUP", "BEFORE_BATCH", "DO_BACKWARD", "DO_OPTIMIZER_STEP", "AFTER_OPTIMIZER_STEP"]


class RaiseAt(TrainingUpdateHook):
    """Raises once, at a stage and a batch."""

    def __init__(self, stage: str, batch: int = 0, error: BaseException | None = None):
        self.stage, self.batch, self.error = stage, batch, error or ZeroDivisionError("mine")

    def __call__(self, ctx, stage, will_skip=False):
        if stage.name == self.stage and ctx.batch_count == self.batch:
            self.batch = -1
            raise self.error
        return True, ctx.loss

    def settled(self, ctx, *, skipped):
        if self.stage == "settled":
            raise self.error


@pytest.mark.parametrize("stage", [*STAGES, "settled"])
def test_an_exception_carries_a_note(make_loop, stage):
    """An exception in a child carries a note with hook, distribution, stage and step."""
    loop = make_loop(PassThrough(), RaiseAt(stage))
    loop.steps = 7
    with pytest.raises(ZeroDivisionError, match="mine") as caught:  # noqa: PT012 - SETUP is part of the loop
        loop.orchestrator(loop.context(), TrainingStage.SETUP)
        loop.batch(1.0)
    at = "AFTER_OPTIMIZER_STEP" if stage == "settled" else stage  # it follows that stage, and has none of its own
    assert caught.value.__notes__ == [f"In hook RaiseAt (no installed distribution), stage {at}, step 7."]


def test_the_note_names_distribution_and_version(make_loop, monkeypatch):
    """The note names the distribution and the version that the hook came from."""
    from nvalchemi import metadata

    monkeypatch.setattr(metadata, "provenance_of", lambda hook: metadata.Provenance("acme-hooks", "2.1"))
    with pytest.raises(ZeroDivisionError) as caught:
        make_loop(RaiseAt("DO_BACKWARD")).batch(1.0)
    assert caught.value.__notes__ == ["In hook RaiseAt (acme-hooks 2.1), stage DO_BACKWARD, step 0."]


def test_the_error_is_the_hooks_own(make_loop):
    """The exception that arrives is the very one that the child raised, of whatever type."""
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        make_loop(RaiseAt("BEFORE_BATCH", error=error)).batch(1.0)
    assert caught.value is error


def test_one_note_for_one_error(make_loop):
    """An error that passes two orchestrators on its way is noted once, by the hook it came from."""

    class Outer(TrainingUpdateHook):
        def __init__(self, inner):
            self.inner = inner

        def setup(self, ctx):
            self.inner(ctx, TrainingStage.SETUP)

    outer = TrainingUpdateOrchestrator(Outer(TrainingUpdateOrchestrator(RaiseAt("SETUP"))))
    with pytest.raises(ZeroDivisionError) as caught:
        outer(TrainContext(), TrainingStage.SETUP)
    assert len(caught.value.__notes__) == 1
    assert "RaiseAt" in caught.value.__notes__[0]


@pytest.mark.parametrize("stage", ["BEFORE_BATCH", "DO_BACKWARD", "DO_OPTIMIZER_STEP", "AFTER_OPTIMIZER_STEP"])
@pytest.mark.parametrize("kind", ["none", "counting_scaler", "public_scaler", "folding_scaler"])
def test_the_next_batch_works(make_loop, scale, request, stage, kind):
    """After an exception the next batch starts from cleared gradients and steps once, with any scaler."""
    scaler = None if kind == "none" else request.getfixturevalue(kind)()
    loop = make_loop(*([scale(scaler)] if scaler else []), RaiseAt(stage))
    with pytest.raises(ZeroDivisionError):
        loop.batch(100.0)
    before = loop.values[0]
    loop.batches = 1
    loop.batch(2.0)
    assert loop.values == [before - 2.0]
    if kind in ("counting_scaler", "public_scaler"):
        assert scaler.get_scale() == 8.0


@pytest.mark.parametrize("stage", ["BEFORE_BATCH", "DO_BACKWARD", "DO_OPTIMIZER_STEP", "AFTER_OPTIMIZER_STEP"])
def test_autocast_is_closed_when_a_later_hook_raises(make_loop, stage):
    """Whatever raises, autocast opened for the batch is closed, and the next batch runs without it."""

    class Autocast(TrainingUpdateHook):
        priority = 20

        def before_batch(self, ctx, *, will_skip):
            if ctx.batch_count == 0:
                ctx.enter_batch_context(torch.autocast("cpu", torch.bfloat16))
            return True

    class Watch(TrainingUpdateHook):
        def transform_loss(self, ctx, loss):
            self.autocast = torch.is_autocast_enabled("cpu")
            return loss

    watch = Watch()
    loop = make_loop(Autocast(), watch, RaiseAt(stage))
    with pytest.raises(ZeroDivisionError):
        loop.batch(1.0)
    assert not torch.is_autocast_enabled("cpu")
    loop.batches = 1
    loop.batch(1.0)
    assert watch.autocast is False


def test_a_child_that_raises_ends_the_batch_contexts_without_a_with_block():
    """Contexts of the batch are closed when a child raises, also in a loop without a ``with`` block."""

    class Autocast(TrainingUpdateHook):
        def before_batch(self, ctx, *, will_skip):
            ctx.enter_batch_context(torch.autocast("cpu", torch.bfloat16))
            return True

    orchestrator = TrainingUpdateOrchestrator(Autocast(), RaiseAt("BEFORE_BATCH"))
    with pytest.raises(ZeroDivisionError):
        orchestrator(TrainContext(), TrainingStage.BEFORE_BATCH)
    assert not torch.is_autocast_enabled("cpu")


def test_an_optimizer_that_raises_leaves_no_trace(make_loop, scale, folding_scaler):
    """When the step of an optimizer raises, the next batch still steps on true gradients, folded or not."""
    loop = make_loop(scale(folding_scaler()), optimizers=lambda ps: [torch.optim.SGD(ps, lr=1.0, fused=True)])
    (optimizer,) = loop.optimizers

    def fail(*_):
        raise OSError("no memory")

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(OSError, match="no memory"):
        loop.batch(100.0)
    handle.remove()
    assert not hasattr(optimizer, "grad_scale")
    loop.batch(2.0)
    assert loop.values == [-1.0]


def test_nobody_is_blamed_for_what_no_hook_did(make_loop):
    """An optimizer or a backward pass that raises is blamed on no hook."""

    class Both(TrainingUpdateHook):
        def transform_loss(self, ctx, loss):
            return loss * 1.0

        def before_optimizer_step(self, ctx, *, will_skip):
            return True

    def fail(*_):
        raise OSError("mine")

    loop = make_loop(Both())
    loop.optimizers[0].register_step_pre_hook(fail)
    with pytest.raises(OSError, match="mine") as caught:
        loop.batch(1.0)
    assert not hasattr(caught.value, "__notes__")
    loop.parameters[0].register_hook(fail)
    with pytest.raises(OSError, match="mine") as caught:
        loop.batch(1.0)
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("kind", ["counting_scaler", "public_scaler", "folding_scaler"])
def test_a_window_that_began_with_an_error_knows_its_scaler(make_loop, scale, request, kind):
    """After an error at BEFORE_BATCH a batch that keeps gradients still steps on unscaled ones."""

    class Keep(TrainingUpdateHook):
        def before_batch(self, ctx, *, will_skip):
            return False

    loop = make_loop(scale(request.getfixturevalue(kind)()), RaiseAt("BEFORE_BATCH"), Keep())
    with pytest.raises(ZeroDivisionError):
        loop.batch(2.0)
    loop.batches = 1
    loop.batch(2.0)
    assert loop.values == [-1.0]
