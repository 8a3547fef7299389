"""What an update with all four plugins costs, in exact counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nvalchemi.hooks import TrainContext
from nvalchemi.testing import StepCost
from nvalchemi.training import EMAHook, GradientClipHook, GradScalerVetoHook, LossScalingHook, TrainingStage
from nvalchemi.training.hooks import TrainingUpdateOrchestrator, decision, window

FOUR = (LossScalingHook, GradScalerVetoHook, GradientClipHook, EMAHook)


def cost_of_update(*, tensors: int, elements: int, lazy: bool) -> StepCost:
    """The cost of DO_OPTIMIZER_STEP and AFTER_OPTIMIZER_STEP with fused AdamW, after three other steps."""
    model = nn.ParameterList([nn.Parameter(torch.full((elements,), 0.5)) for _ in range(tensors)])
    optimizer = torch.optim.AdamW(model, fused=True)
    update = TrainingUpdateOrchestrator(*(hook() for hook in FOUR), lazy=lazy)
    with TrainContext(models={"main": model}) as ctx:
        update(ctx, TrainingStage.SETUP)
    for step in range(4):
        with TrainContext(models={"main": model}, optimizers=[optimizer], step_count=step) as ctx:
            update(ctx, TrainingStage.BEFORE_BATCH)
            ctx.loss = torch.stack([parameter.square().sum() for parameter in model]).sum()
            update(ctx, TrainingStage.DO_BACKWARD)
            with StepCost() as cost:
                update(ctx, TrainingStage.DO_OPTIMIZER_STEP)
                update(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
    outcome = update.resolve()
    assert outcome.optimizers[0].division == "folded"
    assert outcome.resolution == ("lazily, after the step" if lazy else "before the step")
    return cost


@pytest.mark.parametrize(("lazy", "most"), [(False, 14), (True, 16)])
def test_operations_do_not_depend_on_how_many_tensors_there_are(lazy, most):
    """The update launches at most 14 operations, 16 where the veto stays on the device, for 8 tensors as for 300."""
    few, many = (cost_of_update(tensors=count, elements=4, lazy=lazy) for count in (8, 300))
    assert few.ops_by_name == many.ops_by_name
    assert few.ops == many.ops <= most, dict(few.ops_by_name)


@pytest.mark.parametrize("lazy", [False, True])
def test_an_update_moves_48_bytes_a_parameter(lazy):
    """Norm 4, optimizer 32 and average 12: nothing else walks over the weights."""
    small, large = (cost_of_update(tensors=4, elements=count, lazy=lazy) for count in (10_000, 20_000))
    assert (large.bytes - small.bytes) / (4 * 10_000) == 48.0


@pytest.mark.parametrize("lazy", [False, True])
def test_nothing_but_the_common_read_makes_the_host_wait(lazy):
    """No operation of an update reads from the device; the common read is none on a CPU, see the next test."""
    cost = cost_of_update(tensors=8, elements=4, lazy=lazy)
    assert cost.host_reads == 0, cost.host_read_sites


def test_the_host_reads_all_it_has_to_know_at_once(monkeypatch):
    """Flags, norms and readings of all plugins are read together, once a step."""
    reads = []
    for module in (decision, window):
        real = module.read_together
        monkeypatch.setattr(
            module, "read_together", lambda tensors, real=real: reads.append(len(tensors)) or real(tensors)
        )
    cost_of_update(tensors=8, elements=4, lazy=False)
    assert len(reads) == 4  # one for each of four steps
