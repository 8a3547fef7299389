"""How the hook is found, moved between processes, and what it costs."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateOrchestrator
from nvalchemi_hooks_scaler_veto import GradScalerVetoHook
from nvalchemi_hooks_scaler_veto.kernels import first_nonfinite, reference
from nvalchemi_hooks_scaler_veto.plugin import nvalchemi_hooks


class Dispatched(TorchDispatchMode):
    """Collects the names of the operations that are dispatched."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


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


@pytest.mark.parametrize("fused", [True, False])
def test_the_check_costs_one_pass_and_no_host_read_of_its_own(fused):
    """A step adds one pass over the gradients, at most one host read in all, and none is asked for by this plugin."""
    hook = GradScalerVetoHook()
    update = TrainingUpdateOrchestrator(hook)
    weights = [torch.nn.Parameter(torch.randn(5)) for _ in range(3)]
    optimizers = [torch.optim.SGD(weights, lr=0.1, fused=fused)]
    asked, dispatched = Asked(), Dispatched()
    for mode in (asked, dispatched):
        with TrainContext(optimizers=optimizers) as ctx:
            update(ctx, TrainingStage.BEFORE_BATCH)
            torch.stack([weight.sum() for weight in weights]).sum().backward()
            with mode:
                update(ctx, TrainingStage.DO_OPTIMIZER_STEP)
                update(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
    assert asked.files, "nobody asks at all: the check checks nothing"
    assert not [file for file in asked.files if "nvalchemi_hooks_scaler_veto" in file]
    assert sum(dispatched.ops.count(name) for name in ("_local_scalar_dense", "is_nonzero", "equal", "nonzero")) <= 1
    assert dispatched.ops.count("_foreach_norm") == 1
    assert not {"_foreach_div_", "_foreach_mul_", "isfinite"} & set(dispatched.ops)


@settings(max_examples=80, deadline=None)
@given(values=st.lists(st.lists(st.floats(width=32), max_size=4), max_size=4))
def test_the_culprit_is_that_of_the_literal_search(values):
    """The fast search finds the first tensor that is not finite, as the literal one does."""
    tensors = [torch.tensor(row) for row in values]
    expected = next((i for i, row in enumerate(values) if not all(map(math.isfinite, row))), None)
    assert first_nonfinite(tensors) == reference.first_nonfinite(tensors) == expected


@pytest.mark.parametrize("search", [first_nonfinite, reference.first_nonfinite])
def test_large_elements_are_finite_in_every_dtype(search):
    """The largest number of a dtype is no culprit; an inf or a nan behind it, complex or sparse, is."""
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    largest = [torch.full((3,), torch.finfo(dtype).max, dtype=dtype) for dtype in dtypes]
    sparse = torch.sparse_coo_tensor([[1]], [math.nan], (4,), check_invariants=True)
    assert search([*largest, torch.empty(0)]) is None
    assert search([*largest, torch.tensor([0.0, complex(0, math.inf)])]) == 4
    assert search([*largest, sparse]) == 4


def test_the_offer_makes_a_hook_with_and_without_settings():
    """Discovery finds one hook that anybody may have: default_kwargs is empty, not None."""
    (offer,) = nvalchemi_hooks()
    assert (offer.name, offer.default_kwargs) == ("scaler_veto", {})
    assert isinstance(offer.factory(), GradScalerVetoHook)
    assert offer.factory(max_consecutive_skips=3).max_consecutive_skips == 3


def test_the_door_is_lazy():
    """Importing the package or its plugin module loads neither torch nor pydantic."""
    code = (
        "import sys, nvalchemi_hooks_scaler_veto as door, nvalchemi_hooks_scaler_veto.plugin as plugin\n"
        "plugin.nvalchemi_hooks()\n"
        "print(dir(door), sorted({'torch', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['GradScalerVetoHook'] []"


def test_the_public_doors_hand_out_the_class():
    """The class is the same at every door."""
    import nvalchemi.training
    import nvalchemi.training.hooks

    assert nvalchemi.training.GradScalerVetoHook is nvalchemi.training.hooks.GradScalerVetoHook is GradScalerVetoHook


def test_without_an_orchestrator_the_hook_says_what_is_missing():
    """Called by hand on a fresh context, the hook names the orchestrator."""
    with pytest.raises(RuntimeError, match="TrainingUpdateOrchestrator"):
        GradScalerVetoHook().before_optimizer_step(TrainContext(), will_skip=False)
