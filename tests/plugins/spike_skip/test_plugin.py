"""How the hook is found and told what to do, and what it costs."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from nvalchemi.hooks import TrainContext
from nvalchemi.testing import StepCost
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator, UpdatePriority
from nvalchemi_hooks_spike_skip import SpikeSkipHook
from nvalchemi_hooks_spike_skip.plugin import nvalchemi_hooks


class ReadsNorm(TrainingUpdateHook):
    """Has the norm measured and read with the step's one read, as clipping does."""

    reads_grad, defers_veto, priority = False, True, UpdatePriority.CLIP

    def before_optimizer_step(self, ctx, *, will_skip):
        ctx.read_later(ctx.grad_norm)
        ctx.defer_veto_nonfinite("not finite")
        return True


def cost_of_step(*hooks, lazy=False):
    """The cost of a judged step of three batches that went before."""
    update = TrainingUpdateOrchestrator(ReadsNorm(), *hooks, lazy=lazy)
    weights = [torch.nn.Parameter(torch.ones(5)) for _ in range(3)]
    optimizers = [torch.optim.AdamW(weights, lr=0.1, fused=True)]
    for _ in range(4):
        with TrainContext(optimizers=optimizers) as ctx, StepCost() as cost:
            update(ctx, TrainingStage.BEFORE_BATCH)
            ctx.loss = torch.stack([weight.sum() for weight in weights]).sum() ** 2
            for stage in (
                TrainingStage.DO_BACKWARD,
                TrainingStage.DO_OPTIMIZER_STEP,
                TrainingStage.AFTER_OPTIMIZER_STEP,
            ):
                update(ctx, stage)
    assert update.last_outcome.resolution == ("lazily, after the step" if lazy else "before the step")
    return cost


@pytest.mark.parametrize("lazy", [False, True])
def test_it_costs_no_host_read_of_its_own(lazy):
    """Watching both costs no host read and no pass over gradients beside the norm's, in an eager and a lazy update."""
    hook = SpikeSkipHook(window=2, warmup=1, threshold=20.0, min_ratio=100.0)
    without, cost = cost_of_step(lazy=lazy), cost_of_step(hook, lazy=lazy)
    assert len(hook.state_dict()["histories"]["loss"]) == 2
    assert cost.host_reads == without.host_reads
    assert cost.ops_by_name["_foreach_norm"] == without.ops_by_name["_foreach_norm"] == 1
    assert cost.ops - without.ops == (10 if lazy else 6)
    assert all(count == 1 for name, count in cost.ops_by_name.items() if name.startswith("_fused"))


def test_the_device_is_not_asked_by_this_plugin(monkeypatch):
    """No line of the plugin reads a tensor: the core reads all numbers of the step together."""
    asked = []
    for name in ("item", "tolist", "__bool__", "__float__", "cpu"):
        inner = getattr(torch.Tensor, name)

        def read(tensor, *args, inner=inner, **kwargs):
            asked.append(sys._getframe(1).f_code.co_filename)
            return inner(tensor, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, read)
    cost_of_step(SpikeSkipHook(window=2, warmup=1))
    assert asked, "nobody asks at all: the check checks nothing"
    assert not [file for file in asked if "nvalchemi_hooks_spike_skip" in file]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("watch", "losses"),
        ("watch", None),
        ("threshold", -1.0),
        ("threshold", math.nan),
        ("threshold", math.inf),
        ("threshold", True),
        ("window", 0),
        ("window", 1.5),
        ("window", True),
        ("warmup", 0),
        ("warmup", 129),
        ("min_ratio", 0.9),
        ("min_ratio", "2"),
        ("max_consecutive_skips", 0),
        ("max_consecutive_skips", True),
        ("on_limit", "halt"),
        ("signed_loss", 1),
    ],
)
def test_bad_settings_are_refused_when_the_hook_is_built(field, value):
    """A setting out of range is a ValueError that names field, value and remedy."""
    with pytest.raises(ValueError, match=f"SpikeSkipHook: {field} is ") as caught:
        SpikeSkipHook(**{field: value})
    assert repr(value) in str(caught.value)
    assert "give" in str(caught.value)


def test_the_offer_has_to_be_named():
    """Discovery finds one hook that no run has without asking: default_kwargs is None."""
    (offer,) = nvalchemi_hooks()
    assert (offer.name, offer.default_kwargs) == ("spike_skip", None)
    assert offer.factory(watch="loss").watch == "loss"


def test_it_judges_after_clipping_and_before_averages():
    """The priority is that of spike skipping, and hooks that watch different numbers can be told apart."""
    assert SpikeSkipHook.priority == UpdatePriority.SKIP_SPIKES == 40
    hooks = [SpikeSkipHook(), SpikeSkipHook(watch="loss"), SpikeSkipHook(watch="grad_norm")]
    keys = [hook.state_key for hook in TrainingUpdateOrchestrator(*hooks).iter_hooks()]
    assert keys == ["spike_skip", "spike_skip-loss", "spike_skip-grad_norm"]


def test_the_door_is_lazy():
    """Importing the package or its plugin module loads neither torch nor pydantic."""
    code = (
        "import sys, nvalchemi_hooks_spike_skip as door, nvalchemi_hooks_spike_skip.plugin as plugin\n"
        "plugin.nvalchemi_hooks()\n"
        "print(dir(door), sorted({'torch', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "['Skip', 'SpikeSkipHook'] []"


def test_the_public_doors_hand_out_the_class():
    """The class is the same at every door."""
    import nvalchemi.training
    import nvalchemi.training.hooks

    assert nvalchemi.training.SpikeSkipHook is nvalchemi.training.hooks.SpikeSkipHook is SpikeSkipHook


def test_without_an_orchestrator_or_a_loss_the_hook_says_what_is_missing():
    """Called by hand, or where no loss went through the backward pass, the hook names what to do."""
    with pytest.raises(RuntimeError, match="TrainingUpdateOrchestrator"):
        SpikeSkipHook().before_optimizer_step(TrainContext(), will_skip=False)
    weight = torch.nn.Parameter(torch.ones(1))
    update = TrainingUpdateOrchestrator(SpikeSkipHook())
    with TrainContext(optimizers=[torch.optim.SGD([weight])]) as ctx:
        update(ctx, TrainingStage.BEFORE_BATCH)
        weight.grad = torch.ones(1)
        with pytest.raises(RuntimeError, match=r"DO_BACKWARD; .*watch='grad_norm'"):
            update(ctx, TrainingStage.DO_OPTIMIZER_STEP)
