"""Models whose parameters are spread over ranks."""

from __future__ import annotations

import subprocess
import sys

SHARDED = """
import sys

import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel

from nvalchemi.hooks import TrainContext
from nvalchemi_hooks_ema import EMAHook, kernels

WEIGHTS = [torch.arange(5.0) + step for step in range(3)]


class Sharded(EMAHook):
    def _build_averaged_model(self, source):
        averaged = AveragedModel(nn.Identity())
        averaged.module = fully_shard(nn.Linear(1, 5, bias=False), mesh=init_device_mesh("cpu", (2,)))
        return averaged


def work(rank, group):
    distributed.init_process_group("gloo", init_method=group, rank=rank, world_size=2)
    model = fully_shard(nn.Linear(1, 5, bias=False), mesh=init_device_mesh("cpu", (2,)))
    try:
        EMAHook().setup(TrainContext(models={"main": model}))
    except RuntimeError as error:
        assert "refuses a deep copy" in str(error) and "_build_averaged_model" in str(error), error
    else:
        raise AssertionError("a sharded model was copied")
    hook = Sharded(decay=0.75)
    for step, weights in enumerate(WEIGHTS):
        with torch.no_grad():
            mine = weights.chunk(2)[rank]
            model.weight.to_local().copy_(mine.unsqueeze(1))
        hook.after_optimizer_step(TrainContext(models={"main": model}, step_count=step), skipped=False)
    whole = hook.get_averaged_model().module.weight.full_tensor().squeeze(1)
    expected = WEIGHTS[0].lerp(WEIGHTS[1], 0.25).lerp(WEIGHTS[2], 0.25)
    assert torch.equal(whole, expected), (whole, expected)
    average = hook.get_averaged_model().module.weight
    for veto, wanted in ((1.0, expected), (0.0, expected.lerp(WEIGHTS[2], 0.25))):
        with torch.no_grad():
            for call in kernels.blending([(average, model.weight)], 0.25):
                call(veto=torch.tensor(veto))
        assert torch.equal(average.full_tensor().squeeze(1), wanted), veto
    distributed.destroy_process_group()


if __name__ == "__main__":
    multiprocessing.spawn(work, (sys.argv[1],), nprocs=2)
"""


def test_a_sharded_model_is_refused_by_name_or_averaged_shard_by_shard(tmp_path):
    """On two ranks a supplied copy has the whole average, and keeps to a veto; without a copy SETUP says what to do."""
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    done = subprocess.run(
        [sys.executable, str(script), f"file://{tmp_path / 'group'}"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
