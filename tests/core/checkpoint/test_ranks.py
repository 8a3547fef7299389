"""Several ranks: one of them writes."""

from __future__ import annotations

import subprocess
import sys
import textwrap

WORKER = """
    import sys

    import torch
    from torch import distributed

    from nvalchemi.training import OptimizerConfig, TrainingStrategy, create_model_spec, save_checkpoint, save_training

    rank, folder = int(sys.argv[1]), sys.argv[2]
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    spec = create_model_spec(torch.nn.Linear, in_features=1, out_features=1)
    model = spec.build()
    strategy = TrainingStrategy(
        models=model, optimizer_configs=OptimizerConfig(), loss_fn=lambda p, b: p.square().mean(), num_steps=2)
    save_training(f"{folder}/run-{rank}", strategy)
    save_checkpoint(f"{folder}/models-{rank}", models={"main": (model, spec)})
    distributed.barrier()
    distributed.destroy_process_group()
"""


def test_only_the_first_rank_writes(tmp_path):
    """Every rank may call; the first writes, and the others leave no file that could be taken for a checkpoint."""
    (tmp_path / "worker.py").write_text(textwrap.dedent(WORKER), encoding="utf-8")
    command = [sys.executable, str(tmp_path / "worker.py")]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path)]) for rank in range(2)]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    written = sorted(path.parent.name for path in tmp_path.glob("*/manifest.json"))
    assert written == ["models-0", "run-0"]
    assert not (tmp_path / "run-1").exists()
    assert not (tmp_path / "models-1").exists()
