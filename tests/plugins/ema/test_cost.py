"""What an update costs, in exact counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nvalchemi.hooks import TrainContext
from nvalchemi.testing import StepCost
from nvalchemi_hooks_ema import EMAHook


def cost_of_update(model: nn.Module) -> StepCost:
    """The cost of one update, after two others."""
    hook = EMAHook()
    for step in range(2):
        hook.after_optimizer_step(TrainContext(models={"main": model}, step_count=step), skipped=False)
    with StepCost() as cost:
        hook.after_optimizer_step(TrainContext(models={"main": model}, step_count=2), skipped=False)
    assert hook.num_updates == 3
    assert cost.host_reads == 0
    return cost


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 12), (torch.float64, 24)])
@pytest.mark.parametrize("tensors", [8, 300])
def test_an_update_is_one_pass_and_no_host_read(tensors, dtype, size):
    """One multi-tensor operation and one for the counter, however many tensors: two tensors read, one written."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(16, dtype=dtype)) for _ in range(tensors)])
    cost = cost_of_update(model)
    assert cost.ops_by_name.pop("add_") == 1
    assert list(cost.ops_by_name.values()) == [1]
    assert list(cost.ops_by_name) in (["_fused_sgd_"], ["_foreach_lerp_"])
    assert cost.bytes - cost.bytes_by_name["add_"] == size * 16 * tensors


def test_an_update_with_buffers_reads_nothing_on_the_host():
    """Integer buffers add one copy for all of them."""
    cost = cost_of_update(nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(10))))
    assert cost.ops_by_name["_foreach_copy_"] == 1
    assert cost.ops == 3


@pytest.mark.parametrize("tensors", [8, 300])
def test_an_update_in_low_precision_reads_nothing_on_the_host(tensors):
    """Values are widened, blended and rounded, each in one operation: 24 bytes a parameter."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(16, dtype=torch.bfloat16)) for _ in range(tensors)])
    cost = cost_of_update(model)
    assert (cost.ops, cost.ops_by_name["_foreach_copy_"], cost.ops_by_name["add_"]) == (4, 2, 1)
    assert cost.bytes - cost.bytes_by_name["add_"] == 24 * 16 * tensors


def test_a_skipped_step_dispatches_nothing():
    """A skipped step costs no operation at all."""
    model, hook = nn.Linear(1, 1), EMAHook()
    hook.after_optimizer_step(TrainContext(models={"main": model}), skipped=False)
    with StepCost() as cost:
        hook.after_optimizer_step(TrainContext(models={"main": model}, step_count=1), skipped=True)
    assert (cost.ops, cost.host_reads) == (0, 0)
