"""What a hook is told, and what it may open."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from nvalchemi.hooks import HookContext, TrainContext

FIELDS = [
    "batch",
    "model",
    "models",
    "optimizers",
    "lr_schedulers",
    "loss",
    "losses",
    "gradients",
    "grad_norm",
    "grad_scaler",
    "validation",
    "step_count",
    "global_step_count",
    "batch_count",
    "epoch_step_count",
    "epoch",
    "window_complete",
    "step_skipped",
    "device",
    "global_rank",
    "workflow",
]


@pytest.mark.parametrize("name", FIELDS)
def test_what_a_train_context_has(name):
    """`TrainContext` has these fields, each under its own name."""
    assert hasattr(TrainContext, name)


@pytest.mark.parametrize("name", sorted(set(FIELDS) - {"gradients", "grad_norm"}))
def test_fields_are_given_by_keyword(name):
    """Every field that is no computed power is given by keyword."""
    marker = {} if name in ("models", "losses") else torch.nn.Linear(1, 1) if name == "model" else 7
    assert getattr(TrainContext(**{name: marker}), name) is marker or name == "models"


def test_keyword_only():
    """A context is made with keywords only."""
    with pytest.raises(TypeError):
        TrainContext(None)
    with pytest.raises(TypeError):
        HookContext(None)


def test_the_defaults():
    """Nothing is known, nothing was skipped, the window is complete, counters are zero."""
    ctx = TrainContext()
    assert (ctx.loss, ctx.batch, ctx.model, ctx.grad_scaler, ctx.validation, ctx.workflow) == (None,) * 6
    assert (ctx.window_complete, ctx.step_skipped) == (True, False)
    counters = ctx.step_count, ctx.global_step_count, ctx.batch_count, ctx.epoch_step_count, ctx.epoch, ctx.global_rank
    assert counters == (0,) * 6


def test_a_hook_cannot_invent_a_field():
    """A misspelt field is an `AttributeError`, not a silent new one."""
    with pytest.raises(AttributeError):
        TrainContext().window_completed = False


def test_the_main_model():
    """`model` is the main model: ``models["main"]``, or else the first; a single one is stored as ``"main"``."""
    main, critic = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    assert TrainContext(models={"critic": critic, "main": main}).model is main
    assert TrainContext(models={"critic": critic}).model is critic
    assert TrainContext(model=main).models == {"main": main}
    assert TrainContext().models == {}


def test_a_model_that_is_falsy_is_still_the_main_model():
    """A main model whose ``len()`` is 0 is taken all the same."""
    main, other = torch.nn.Sequential(), torch.nn.Linear(1, 1)
    assert TrainContext(models={"other": other, "main": main}).model is main


def test_contexts_share_no_state():
    """Two contexts share neither models nor losses nor what they opened."""
    one, other = TrainContext(), TrainContext()
    one.models["main"] = torch.nn.Linear(1, 1)
    assert other.models == {}


# Contexts of the batch.


@contextmanager
def opened(name, log, fails=False):
    log.append(f"open {name}")
    try:
        yield name
    finally:
        log.append(f"close {name}")
        if fails:
            raise OSError(name)


def test_a_batch_context_is_open_until_the_batch_ends():
    """`enter_batch_context` opens a context at once, and it is closed when the batch ends, the last first."""
    log = []
    with TrainContext() as ctx:
        assert ctx.enter_batch_context(opened("a", log)).value == "a"
        ctx.enter_batch_context(opened("b", log))
        assert log == ["open a", "open b"]
    assert log == ["open a", "open b", "close b", "close a"]


def test_a_hook_may_close_it_before():
    """The hook may close its context earlier, after what was opened inside it; each is closed once."""
    log = []
    with TrainContext() as ctx:
        handle = ctx.enter_batch_context(opened("a", log))
        ctx.enter_batch_context(opened("b", log))
        handle.close()
        handle.close()
        assert log == ["open a", "open b", "close b", "close a"]
    assert log == ["open a", "open b", "close b", "close a"]


@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), KeyboardInterrupt()])
def test_whatever_raises(error):
    """It is closed whatever raises, and what was raised arrives."""
    with pytest.raises(type(error)) as caught, TrainContext() as ctx:  # noqa: PT012 - the block is the point
        ctx.enter_batch_context(torch.autocast("cpu", torch.bfloat16))
        raise error
    assert caught.value is error
    assert not torch.is_autocast_enabled("cpu")


def test_one_that_fails_to_open_leaves_the_others_to_be_closed():
    """Of two contexts where the second fails to open, the first stays open until the batch ends."""

    class Fails:
        def __enter__(self):
            raise OSError("no")

        def __exit__(self, *_):
            raise AssertionError("it was never entered")

    with pytest.raises(OSError, match="no"), TrainContext() as ctx:  # noqa: PT012 - the block is the point
        ctx.enter_batch_context(torch.autocast("cpu", torch.bfloat16))
        try:
            ctx.enter_batch_context(Fails())
        finally:
            assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


def test_one_that_fails_to_close_keeps_nobody_open():
    """All contexts are closed even if one fails; its error arrives, or is attached to the one under way."""
    log = []
    with pytest.raises(OSError, match="b"), TrainContext() as ctx:  # noqa: PT012 - the block is the point
        ctx.enter_batch_context(opened("a", log))
        ctx.enter_batch_context(opened("b", log, fails=True))
    assert log[2:] == ["close b", "close a"]
    with pytest.raises(ZeroDivisionError) as caught, TrainContext() as ctx:  # noqa: PT012 - the block is the point
        ctx.enter_batch_context(opened("c", log, fails=True))
        raise ZeroDivisionError
    assert "c" in "".join(caught.value.__notes__)


def test_a_batch_context_is_told_of_the_error():
    """A context is given the error under way, as a ``with`` block gives it, and cannot swallow it."""

    class Watches:
        def __enter__(self):
            return self

        def __exit__(self, kind, error, traceback):
            self.told = kind, error
            return True

    error, watches = ZeroDivisionError(), Watches()
    with pytest.raises(ZeroDivisionError), TrainContext() as ctx:  # noqa: PT012 - the block is the point
        ctx.enter_batch_context(watches)
        raise error
    assert watches.told == (ZeroDivisionError, error)


def test_a_plain_context_has_this_power_too():
    """Every engine's context can open contexts for the length of its batch."""
    log = []
    with HookContext() as ctx:
        ctx.enter_batch_context(opened("a", log))
    assert log == ["open a", "close a"]


def test_the_loss_is_let_go_of():
    """When the batch ends, loss and named losses hold values and no graph."""
    weight = torch.nn.Parameter(torch.ones(()))
    with TrainContext(loss=weight * 2, losses={"energy": weight * 3}) as ctx:
        pass
    assert (ctx.loss.item(), ctx.loss.requires_grad) == (2.0, False)
    assert (ctx.losses["energy"].item(), ctx.losses["energy"].requires_grad) == (3.0, False)


def test_a_loss_that_is_no_tensor_is_let_go_of():
    """A loss that is no tensor hides no error when the batch ends."""
    with pytest.raises(ZeroDivisionError), TrainContext(loss=3.0, losses={"energy": 1.0}):
        raise ZeroDivisionError
