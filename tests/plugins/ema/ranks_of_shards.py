"""One of several processes that average a sharded model; run by path. It prints what it saw, by name."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim.swa_utils import AveragedModel

from nvalchemi.hooks import TrainContext
from nvalchemi_hooks_ema import EMAHook


class Net(nn.Module):
    """Parameters of odd length, a buffer, a frozen parameter and tied weights."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Parameter(torch.arange(5.0), requires_grad=False)
        self.back = nn.Linear(5, 3, bias=False)
        self.back.weight = nn.Parameter(torch.randn(3, 5))
        self.again = self.back

    def forward(self, x):
        return self.again(self.norm(torch.tanh(self.first(x))) + self.frozen)


def built(*, shard=True, dtype=torch.float32, **options):
    torch.manual_seed(3)
    net = Net().to(dtype)
    if shard:
        fully_shard(net.first, **options)
        fully_shard(net, **options)
    return net


def moved(net, step):
    """Give the model the weights that it has after a step, the same whole tensors on any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for tensor in [*net.parameters(), *net.buffers()]:
            whole = torch.rand(tensor.shape, generator=generator).to(tensor.dtype)
            if isinstance(tensor, torch.distributed.tensor.DTensor):
                whole = torch.distributed.tensor.distribute_tensor(
                    whole, tensor.device_mesh, tensor.placements, src_data_rank=None
                )
            tensor.copy_(whole)


def stepped(hook, net, steps, **more):
    for step in steps:
        moved(net, step)
        hook.after_optimizer_step(TrainContext(models={"main": net}, step_count=step, **more), skipped=False)


def whole(module):
    return {n: getattr(t, "full_tensor", lambda t=t: t)() for n, t in module.state_dict().items()}


def averaged(hook):
    return whole(hook.get_averaged_model().module)


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def copied_in_its_own_way():
    net, alone = built(), built(shard=False)
    hook, single = EMAHook(decay=0.75), EMAHook(decay=0.75)
    for one, model in ((hook, net), (single, alone)):
        one.setup(TrainContext(models={"main": model}))
    assert equal(averaged(hook), averaged(single)), "before the first update it is not a copy"
    with CommDebugMode() as communication:
        stepped(hook, net, range(4))
        state = hook.state_dict()
    stepped(single, alone, range(4))
    module = hook.get_averaged_model().module
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        same_call = torch.allclose(module(x), single.get_averaged_model().module(x), atol=1e-6)
    stepped(hook, net, [4])
    stepped(single, alone, [4])
    with torch.no_grad():
        same_later = torch.allclose(module(x), single.get_averaged_model().module(x), atol=1e-6)
    return {
        "collectives": communication.get_total_counts(),
        "equal": equal(averaged(hook), averaged(single)),
        "called": same_call,
        "called again after another update": same_later,
        "local": module.first.weight.to_local().shape == net.first.weight.to_local().shape,
        "tied": module.again.weight is module.back.weight,
        "state is local": type(state["averaged_model_state"]["module.first.weight"]).__name__,
        "eval": not module.training and not any(p.requires_grad for p in module.parameters()),
    }


def with_low_precision():
    net, alone = built(dtype=torch.bfloat16), built(shard=False, dtype=torch.bfloat16)
    hook, single = EMAHook(decay=0.999), EMAHook(decay=0.999)
    stepped(hook, net, range(5))
    stepped(single, alone, range(5))
    sharded = {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in hook.state_dict()["accumulators"].items()
    }
    return {
        "equal": equal(averaged(hook), averaged(single)),
        "accumulators": equal(sharded, single.state_dict()["accumulators"]),
    }


def with_states():
    net, alone = built(), built(shard=False)
    hook, single = EMAHook(decay=0.5), EMAHook(decay=0.5)
    stepped(hook, net, range(3))
    stepped(single, alone, range(3))
    found = {}
    for name, state in {"its own": hook.state_dict(), "that of one process": single.state_dict()}.items():
        for when in ("before", "after"):
            other = EMAHook(decay=0.5)
            if when == "after":
                other.setup(TrainContext(models={"main": net}))
            other.load_state_dict(state)
            stepped(other, net, [3])
            again = EMAHook(decay=0.5)
            again.load_state_dict(single.state_dict())
            stepped(again, alone, [3])
            found[f"{name}, {when}"] = equal(averaged(other), averaged(again))
    return found


def under_a_veto():
    net = built()
    hook = EMAHook(decay=0.5)
    stepped(hook, net, range(2))
    before = averaged(hook)
    moved(net, 2)
    shadow = hook._shadow
    shadow.update(net, torch.tensor(1.0))
    held = equal(before, averaged(hook))
    shadow.update(net, torch.tensor(0.0))
    return {"held": held, "moved": not equal(before, averaged(hook))}


def with_a_policy():
    net = fully_shard(nn.Linear(3, 5), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    hook = EMAHook()
    stepped(hook, net, [0])
    with torch.no_grad():
        return {"out": str(hook.get_averaged_model().module(torch.ones(2, 3)).dtype)}


class Supplied(EMAHook):
    """A copy of the user's own, sharded at its root alone, which stays gathered when it was called."""

    def _build_averaged_model(self, source):
        model = AveragedModel(nn.Identity())
        model.module = fully_shard(built(shard=False).requires_grad_(False))
        return model


class Whole(EMAHook):
    def _build_averaged_model(self, source):
        model = AveragedModel(nn.Identity())
        model.module = built(shard=False)
        return model


def supplied():
    net = fully_shard(built(shard=False))
    alone = built(shard=False)
    hook, single = Supplied(decay=0.75), EMAHook(decay=0.75)
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(9))
    for step in range(3):
        stepped(hook, net, [step])
        stepped(single, alone, [step])
        with torch.no_grad():
            called = hook.get_averaged_model().module(x)
            expected = single.get_averaged_model().module(x)
    try:
        Whole().setup(TrainContext(models={"main": net}))
    except ValueError as error:
        return {"called": torch.allclose(called, expected, atol=1e-6), "refused": str(error)}
    return {}


@contextmanager
def group(rank, size, store):
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    yield
    distributed.destroy_process_group()


if __name__ == "__main__":
    with group(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]):
        checks = (copied_in_its_own_way, with_low_precision, with_states, under_a_veto, with_a_policy, supplied)
        print(json.dumps({check.__name__: check() for check in checks}))
