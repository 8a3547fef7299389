"""Traps of torch that an update has to go around, where no other test of ours holds them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from nvalchemi.hooks import TrainContext
from nvalchemi.testing.compare import first_difference
from nvalchemi.training import EMAHook, GradientClipHook, GradScalerVetoHook, LossScalingHook, TrainingStage
from nvalchemi.training.hooks import TrainingUpdateOrchestrator
from nvalchemi.training.hooks.decision import fold_flags

INF, NAN = float("inf"), float("nan")
STAGES = (TrainingStage.DO_BACKWARD, TrainingStage.DO_OPTIMIZER_STEP, TrainingStage.AFTER_OPTIMIZER_STEP)


def trained(compile_model: Any, *, lazy: bool) -> dict[str, Any]:
    """Return weights, moments and hooks after ten batches; the fifth holds an inf."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    called = compile_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    hooks = LossScalingHook(), GradScalerVetoHook(), GradientClipHook(max_norm=0.1), EMAHook(decay=0.9)
    update = TrainingUpdateOrchestrator(*hooks, lazy=lazy)
    for number in range(10):
        x = torch.full((2, 3), torch.inf if number == 4 else 1.0 + number)
        with TrainContext(models={"main": called}, optimizers=[optimizer], step_count=number - (number > 4)) as ctx:
            update(ctx, TrainingStage.BEFORE_BATCH)
            ctx.loss = called(x).square().mean()
            for stage in STAGES:
                update(ctx, stage)
    update.resolve()
    return {"weights": model.state_dict(), "optimizer": optimizer.state_dict(), "hooks": update.state_dict()}


@pytest.mark.parametrize("lazy", [False, True])
def test_a_compiled_model_leaves_the_fused_step_outside(lazy):
    """Of a run with a compiled model the forward is compiled and nothing of the update, which has the same bits."""
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    graphs: list[str] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(str(module.graph))
        return module

    compiled = trained(lambda model: torch.compile(model, backend=backend, fullgraph=True), lazy=lazy)
    every = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    assert len(graphs) == every == 1, graphs
    assert "linear" in graphs[0]
    assert "fused" not in graphs[0]
    assert not first_difference(compiled, trained(lambda model: model, lazy=lazy))


@pytest.mark.parametrize("peaks", [[INF], [NAN], [INF, NAN], [INF, INF], [3.0, INF], [3.0]])
def test_a_folded_flag_is_exactly_0_or_1(peaks):
    """However many numbers are not finite, the flag for a fused step is float32 and 1; 2.0 or nan would not skip."""
    flag = fold_flags([], [torch.tensor(peak) for peak in peaks])
    assert flag.dtype == torch.float32
    assert flag.item() == float(not all(peak < INF for peak in peaks))


def test_a_divisor_outlives_the_window_that_is_closed_on_the_device():
    """The scale moves in its place; who holds the divisor of a window keeps its value."""
    scaler = LossScalingHook(init_scale=64.0).scaler
    for expected in (64.0, 32.0, 16.0):
        divisor = scaler.divisor(torch.device("cpu"))
        scaler.close(torch.ones(()))
        assert divisor.item() == expected


def test_doors_load_nothing_heavy():
    """Importing the doors, and asking what they hold, loads neither torch nor what needs it before it is used."""
    heavy = ("torch", "torch._dynamo", "triton", "pydantic", "pluggy")
    code = "import sys, nvalchemi.hooks, nvalchemi.training, nvalchemi.training.hooks; dir(nvalchemi.training)\n"
    code += f"print([name for name in {heavy} if name in sys.modules])\n"
    code += "from nvalchemi.training.hooks import TrainingUpdateOrchestrator, CapturedUpdate\n"
    code += "print([name for name in ('torch._dynamo', 'triton', 'pydantic') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "[]"]
