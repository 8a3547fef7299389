"""What clipping costs: host reads, launches, and the way to the optimizer."""

from __future__ import annotations

import collections
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator, UpdatePriority
from nvalchemi_hooks_grad_clip import GradientClipHook

WAYS = pytest.mark.parametrize(
    "clip",
    [{}, {"max_norm": torch.inf}, {"norm_type": torch.inf}, {"per_optimizer": True}, {"clip_value": 0.1}],
)


class Dispatched(TorchDispatchMode):
    """Counts the operations that are dispatched, host reads among them."""

    def __init__(self):
        super().__init__()
        self.ops = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))

    @property
    def host_reads(self):
        return sum(self.ops[name] for name in ("_local_scalar_dense", "is_nonzero", "equal", "nonzero"))


class Asked(TorchFunctionMode):
    """Collects the files of those who ask for a number on the host."""

    reads = (Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.cpu, Tensor.numpy)

    def __init__(self):
        super().__init__()
        self.files = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in self.reads:
            self.files.append(sys._getframe(1).f_code.co_filename)
        return func(*args, **(kwargs or {}))


class ChecksFinite(TrainingUpdateHook):
    """Vetoes on the device where a gradient is not finite."""

    priority = UpdatePriority.CHECK_FINITE
    reads_grad = False
    defers_veto = True

    def before_optimizer_step(self, ctx, *, will_skip):
        ctx.defer_veto(ctx.window.nonfinite(), "gradients are not finite", found_inf=True)
        return True


class Reads(TrainingUpdateHook):
    """Reads gradients and changes nothing; the update cannot be folded."""


def train(hooks, optimizer_cls, gradients, **options):
    """Step on the given gradients and return weights and moments."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(7))]
    optimizers = [optimizer_cls([weight], lr=0.1, **options) for weight in weights]
    update = TrainingUpdateOrchestrator(*hooks)
    for gradient in gradients:
        step(update, weights, optimizers, gradient)
    return weights, [optimizer.state_dict() for optimizer in optimizers], update


def step(update, weights, optimizers, gradient, around=None):
    with TrainContext(optimizers=optimizers) as ctx:
        update(ctx, TrainingStage.BEFORE_BATCH)
        ctx.loss = torch.stack([(weight.sin() * gradient).sum() for weight in weights]).sum()
        update(ctx, TrainingStage.DO_BACKWARD)
        if around is None:
            update(ctx, TrainingStage.DO_OPTIMIZER_STEP)
        else:
            with around:
                update(ctx, TrainingStage.DO_OPTIMIZER_STEP)
        update(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)


@WAYS
@pytest.mark.parametrize(
    ("optimizer_cls", "options"),
    [(torch.optim.AdamW, {}), (torch.optim.Adam, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.SGD, {})],
)
def test_folded_and_plain_agree_bit_for_bit(optimizer_cls, options, clip):
    """A fused optimizer that divides in its own pass does exactly what a division before it does."""
    gradients = [3.0, 0.01, 20.0, torch.inf, 7.0]
    folded, moments, update = train([GradientClipHook(**clip)], optimizer_cls, gradients, fused=True, **options)
    plain = train([GradientClipHook(**clip), Reads()], optimizer_cls, gradients, fused=True, **options)
    torch.testing.assert_close((folded, moments), plain[:2], rtol=0, atol=0)
    assert next(update.iter_hooks()).measured_steps == len(gradients)


def test_a_fused_step_writes_nothing_before_the_optimizer():
    """With a fused optimizer clipping adds no operation that changes gradients."""
    for fused, writes in ((True, 0), (False, 2)):
        update = TrainingUpdateOrchestrator(GradientClipHook())
        weights = [nn.Parameter(torch.randn(5)) for _ in range(2)]
        optimizers = [torch.optim.AdamW([weight], fused=fused) for weight in weights]
        step(update, weights, optimizers, 3.0, around=(dispatched := Dispatched()))
        assert dispatched.ops["_foreach_div_"] == writes


@WAYS
@pytest.mark.parametrize("fused", [True, False])
def test_at_most_one_host_read_a_step(clip, fused):
    """Together with a finite check the step dispatches at most one host read, and none is asked for by this plugin."""
    hook = GradientClipHook(**clip)
    update = TrainingUpdateOrchestrator(ChecksFinite(), hook)
    weights = [nn.Parameter(torch.randn(5)) for _ in range(3)]
    optimizers = [torch.optim.SGD([weight], lr=0.1, fused=fused) for weight in weights]
    step(update, weights, optimizers, 3.0, around=(dispatched := Dispatched()))
    step(update, weights, optimizers, 3.0, around=(asked := Asked()))
    assert dispatched.host_reads <= 1
    assert asked.files, "nobody asks at all: the check checks nothing"
    assert not [file for file in asked.files if "nvalchemi_hooks_grad_clip" in file]
    assert hook.last_norm > 0.0


def test_the_number_of_tensors_does_not_matter():
    """Clipping adds as many operations for 300 tensors as for 8."""
    added = []
    for count in (8, 300):
        costs = []
        for hooks in ([], [GradientClipHook()]):
            weights = [nn.Parameter(torch.randn(2)) for _ in range(count)]
            optimizers = [torch.optim.AdamW(weights, fused=True)]
            step(TrainingUpdateOrchestrator(*hooks), weights, optimizers, 3.0, around=(dispatched := Dispatched()))
            costs.append(sum(n for name, n in dispatched.ops.items() if name != "detach"))
        added.append(costs[1] - costs[0])
    assert added[0] == added[1] <= 11
