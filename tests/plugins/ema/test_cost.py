"""What an update costs, in exact counts."""

from __future__ import annotations

import collections

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nvalchemi.hooks import TrainContext
from nvalchemi_hooks_ema import EMAHook


class Dispatched(TorchDispatchMode):
    """Counts the operations that torch dispatches, by name."""

    def __init__(self):
        super().__init__()
        self.names = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **kwargs or {})


def operations(model: nn.Module) -> dict[str, int]:
    """The operations of one update, after two others."""
    hook = EMAHook()
    for step in range(2):
        hook.after_optimizer_step(TrainContext(models={"main": model}, step_count=step), skipped=False)
    with Dispatched() as dispatched:
        hook.after_optimizer_step(TrainContext(models={"main": model}, step_count=2), skipped=False)
    assert hook.num_updates == 3
    return dict(dispatched.names)


@pytest.mark.parametrize("tensors", [8, 300])
def test_an_update_of_float32_is_one_pass_and_no_host_read(tensors):
    """One multi-tensor operation and one for the counter, however many tensors there are."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(tensors)])
    counted = operations(model)
    assert counted.pop("add_") == 1
    assert list(counted.values()) == [1]
    assert list(counted) in (["_fused_sgd_"], ["_foreach_lerp_"])


def test_an_update_with_buffers_reads_nothing_on_the_host():
    """Integer buffers add one copy for all of them."""
    counted = operations(nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(10))))
    assert counted.pop("_foreach_copy_") == 1
    assert sum(counted.values()) == 2


def test_an_update_in_low_precision_reads_nothing_on_the_host():
    """Values are widened, blended and rounded, each in one operation; nothing asks the device for a number."""
    counted = operations(nn.Sequential(*(nn.Linear(2, 2, dtype=torch.bfloat16) for _ in range(10))))
    assert counted.pop("_foreach_copy_") == 2
    assert counted.pop("add_") == 1
    assert counted in ({"_fused_sgd_": 1}, {"_foreach_lerp_": 1})


def test_a_skipped_step_dispatches_nothing():
    """A skipped step costs no operation at all."""
    model, hook = nn.Linear(1, 1), EMAHook()
    hook.after_optimizer_step(TrainContext(models={"main": model}), skipped=False)
    with Dispatched() as dispatched:
        hook.after_optimizer_step(TrainContext(models={"main": model}, step_count=1), skipped=True)
    assert not dispatched.names
