"""Several ranks: every rank steps, or none does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

WORKER = """
    import json
    import sys
    from datetime import timedelta

    import torch
    from torch import distributed

    from nvalchemi.hooks import TrainContext
    from nvalchemi.training import TrainingStage
    from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator


    class Votes(TrainingUpdateHook):
        reads_grad = False

        def __init__(self, vetoes, defers, found_inf):
            self.vetoes, self.defers_veto, self.found_inf = vetoes, defers, found_inf

        def before_optimizer_step(self, ctx, *, will_skip):
            if self.defers_veto:
                ctx.defer_veto(torch.tensor(float(self.vetoes)), "its own reason", found_inf=self.found_inf)
                return True
            return not self.vetoes


    class Scale(TrainingUpdateHook):
        reads_grad = False
        priority = 20

        def __init__(self, scaler):
            self.scaler = scaler

        def before_batch(self, ctx, *, will_skip):
            ctx.grad_scaler = self.scaler
            return True

        def transform_loss(self, ctx, loss):
            return self.scaler.scale(loss)


    class Folding:
        factor = 8.0

        def is_enabled(self):
            return True

        def scale(self, loss):
            return loss * self.factor

        def divisor(self, device):
            return torch.tensor(self.factor)

        def close(self, found_inf):
            self.factor *= 0.5 if found_inf else 1.0

        def get_scale(self):
            return self.factor


    def train(case, rank):
        scaler = {"torch": torch.amp.GradScaler("cpu", init_scale=8.0), "folding": Folding()}.get(case["scaler"])
        # The first step of an optimizer is never lazy, so there is one batch more before the one of interest.
        first = -1 if case["lazy"] else 0
        parameters = [torch.nn.Parameter(torch.tensor(1.0 - first)) for _ in range(2)]
        optimizers = [torch.optim.SGD([parameter], lr=1.0, fused=case["lazy"]) for parameter in parameters]
        vote = Votes(False, case["defers"], case["found_inf"])
        hooks = [vote, *([Scale(scaler)] if scaler else [])]
        orchestrator = TrainingUpdateOrchestrator(*hooks, lazy=case["lazy"])
        for batch in range(first, 2):
            vote.vetoes = batch == 0 and case["veto"] == rank
            with TrainContext(optimizers=optimizers) as ctx:
                orchestrator(ctx, TrainingStage.BEFORE_BATCH)
                bad = float("inf") if case["inf"] == rank and batch == 0 else 1.0
                ctx.loss = parameters[0] * bad + parameters[1]
                for stage in ("DO_BACKWARD", "DO_OPTIMIZER_STEP", "AFTER_OPTIMIZER_STEP"):
                    orchestrator(ctx, TrainingStage[stage])
            if batch < 0:
                continue
            yield {
                "resolution": ctx.outcome.resolution,
                "values": [parameter.item() for parameter in parameters],
                "skipped": ctx.step_skipped,
                "found_inf": ctx.outcome.found_inf,
                "vetoes": [list(veto) for veto in ctx.outcome.vetoes],
                "scale": scaler.get_scale() if scaler else None,
            }


    rank, store, cases = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    print(json.dumps({name: list(train(case, rank)) for name, case in cases.items()}))
    distributed.destroy_process_group()
"""

DEFAULTS = {"veto": None, "inf": None, "scaler": "none", "defers": False, "found_inf": False, "lazy": False}
EAGER = {
    "veto": {"veto": 1},
    "deferred veto": {"veto": 1, "defers": True},
    "veto, torch": {"veto": 0, "scaler": "torch"},
    "veto, folding": {"veto": 0, "scaler": "folding"},
    "inf, torch": {"inf": 1, "scaler": "torch"},
    "inf, folding": {"inf": 1, "scaler": "folding"},
    "deferred inf, torch": {"veto": 1, "scaler": "torch", "defers": True, "found_inf": True},
    "deferred inf, folding": {"veto": 1, "scaler": "folding", "defers": True, "found_inf": True},
}
LAZY = ["veto", "deferred veto", "inf, folding", "deferred inf, folding", "veto, folding"]
CASES = {**EAGER, **{f"lazy {name}": EAGER[name] | {"lazy": True} for name in LAZY}}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Train two batches on two gloo ranks, once for each case: {case: (what rank 0 reports, what rank 1 reports)}."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "worker.py").write_text(textwrap.dedent(WORKER))
    cases = json.dumps({name: DEFAULTS | case for name, case in CASES.items()})
    started = [
        subprocess.Popen(
            [sys.executable, str(folder / "worker.py"), str(rank), str(folder / "store"), cases],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        answers = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], answers
    first, second = (json.loads(out) for out, _ in answers)
    return {name: (first[name], second[name]) for name in CASES}


@pytest.mark.parametrize("case", ["veto", "deferred veto", "lazy veto", "lazy deferred veto"])
def test_a_veto_on_one_rank_skips_on_both(ranks, case):
    """Vetoes of all hooks are OR-ed over the ranks before the step: every rank steps, or none does."""
    here, there = ranks[case]
    assert [rank[0]["values"] for rank in (here, there)] == [[1.0, 1.0]] * 2
    assert [rank[1]["values"] for rank in (here, there)] == [[0.0, 0.0]] * 2
    assert here[0]["skipped"]
    assert there[0]["skipped"]
    assert [veto[0] for veto in here[0]["vetoes"]] == ["another rank"]
    assert [veto[0] for veto in there[0]["vetoes"]] == ["votes"]


@pytest.mark.parametrize("case", ["veto, torch", "veto, folding", "lazy veto, folding"])
def test_a_veto_on_one_rank_leaves_both_scales(ranks, case):
    """A veto on finite gradients, on one rank, leaves the scale of both as it was, and the next window works."""
    for rank in ranks[case]:
        assert [batch["scale"] for batch in rank] == [8.0, 8.0]
        assert [batch["values"] for batch in rank] == [[1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("case", ["inf, torch", "inf, folding", "lazy inf, folding"])
def test_an_inf_on_one_rank_backs_off_on_both(ranks, case):
    """An inf that one rank alone found skips that optimizer, and backs the scale off once, on both ranks."""
    for rank in ranks[case]:
        assert [batch["values"] for batch in rank] == [[1.0, 0.0], [0.0, -1.0]]
        assert [batch["scale"] for batch in rank] == [4.0, 4.0]
        assert [batch["found_inf"] for batch in rank] == [True, False]


@pytest.mark.parametrize("case", ["deferred inf, torch", "deferred inf, folding", "lazy deferred inf, folding"])
def test_a_veto_that_means_found_inf_backs_off_on_both(ranks, case):
    """A veto deferred with ``found_inf=True`` on one rank backs the scale off on both."""
    for rank in ranks[case]:
        assert [batch["scale"] for batch in rank] == [4.0, 4.0]
        assert [batch["values"] for batch in rank] == [[1.0, 1.0], [0.0, 0.0]]


def test_ranks_agree_on_the_device(ranks):
    """In lazy mode a vote is or-ed on the device; a rank that has decided on its host meets the others in it.

    A loss scale that all ranks share is settled at once: a rank that vetoes finite gradients leaves it as it is.
    """
    resolutions = {name: [rank[0]["resolution"] for rank in ranks[f"lazy {name}"]] for name in LAZY}
    assert resolutions.pop("veto") == ["lazily, after the step", "at once: a hook has vetoed"]
    assert resolutions.pop("deferred veto") == ["lazily, after the step"] * 2
    assert all("leave the loss scale" in one or "has vetoed" in one for both in resolutions.values() for one in both)
