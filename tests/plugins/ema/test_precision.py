"""Low precision, devices and dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nvalchemi_hooks_ema import EMAHook

LOW = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", LOW)
def test_a_low_precision_average_moves(dtype, primed, fill, follow):
    """A thousand updates towards 2 from 1 at decay 0.999 end at 2 - 0.999**1000, not at 1."""
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    hook = primed(model, 1.0)
    fill(model, 2.0)
    for step in range(1, 1001):
        follow(hook, model, step)
    weight = hook.get_averaged_model().module.weight
    assert hook.state_dict()["accumulators"]["weight"].item() == pytest.approx(2 - 0.999**1000, abs=1e-5)
    assert weight.dtype == dtype
    assert weight.item() == pytest.approx(2 - 0.999**1000, abs=4e-3)


@pytest.mark.parametrize("dtype", LOW)
def test_accumulators_average_as_a_float32_model_would(dtype, perturb, follow):
    """The accumulators are the bits of the average of a float32 model; the shadow is exactly the rounded value."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7)).to(dtype)
    wide = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    expected = AveragedModel(wide, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    hook = EMAHook(decay=0.9)
    for step in range(10):
        perturb(model, step)
        follow(hook, model, step)
        wide.load_state_dict(model.state_dict())
        expected.update_parameters(wide)
    accumulators = hook.state_dict()["accumulators"]
    averaged = dict(hook.get_averaged_model().module.named_parameters())
    for name, parameter in expected.module.named_parameters():
        assert torch.equal(accumulators[name], parameter), name
        assert torch.equal(averaged[name], parameter.to(dtype)), name
    assert {"1.running_mean", "1.running_var"} <= set(accumulators)  # floating buffers are averaged as exactly


def test_only_low_precision_weights_have_accumulators(primed, context):
    """A model of mixed dtypes has accumulators for its bfloat16 part alone, a float32 model none."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).bfloat16())
    assert sorted(primed(model, 1.0).state_dict()["accumulators"]) == ["1.bias", "1.weight"]
    assert "accumulators" not in primed(nn.Linear(1, 1), 1.0).state_dict()


@pytest.mark.parametrize("chunk", [1, 4, 10])
def test_many_large_low_precision_tensors_are_averaged_in_parts(chunk, monkeypatch, primed, fill, follow):
    """Cutting lists, and tensors that are larger than a part, changes no number."""
    monkeypatch.setattr("nvalchemi_hooks_ema.kernels.rounded._CHUNK", chunk)
    model = nn.Sequential(*(nn.Linear(3, 3, dtype=torch.bfloat16) for _ in range(5)))
    hook = primed(model, 0.0, decay=0.75)
    fill(model, 4.0)
    follow(hook, model, 1)
    assert all((parameter == 1.0).all() for parameter in hook.get_averaged_model().module.parameters())


def test_averaged_weights_that_somebody_wrote_are_where_the_average_goes_on(primed, fill, follow):
    """Weights loaded into the averaged bfloat16 model are not undone by the accumulators."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    hook = primed(model, 1.0, decay=0.5)
    fill(hook.get_averaged_model().module, 8.0)
    assert hook.state_dict()["accumulators"]["weight"].item() == 8.0
    fill(model, 4.0)
    follow(hook, model, 1)
    assert hook.get_averaged_model().module.weight.item() == 6.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *LOW])
def test_the_average_has_the_dtype_of_its_source(dtype, primed):
    """Each averaged parameter and floating buffer has the dtype of the live one; integer buffers keep theirs."""
    model = nn.BatchNorm1d(2).to(dtype)
    module = primed(model, 1.0).get_averaged_model().module
    assert (module.weight.dtype, module.running_mean.dtype) == (dtype, dtype)
    assert module.num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize("moved", ["live", "averaged"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_after_a_change_of_dtype_the_average_follows_its_source(moved, dtype, primed, fill, follow):
    """When either model is cast, the next update brings the average in line and blends the values as they were."""
    model = nn.BatchNorm1d(1)
    hook = primed(model, 0.0, decay=0.75)
    (model if moved == "live" else hook.get_averaged_model()).to(dtype)
    fill(model, 4.0)
    follow(hook, model, 1)
    module = hook.get_averaged_model().module
    assert (module.weight.dtype, module.running_var.dtype) == (model.weight.dtype, model.running_var.dtype)
    assert (module.weight.item(), module.running_var.item()) == (1.0, 1.0)


def test_a_model_that_leaves_low_precision_keeps_what_the_accumulators_knew(primed, fill, follow):
    """Cast to float32, the average goes on from the exact value, not from the rounded one."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    hook = primed(model, 1.0)
    fill(model, 2.0)
    follow(hook, model, 1)
    model.float()
    follow(hook, model, 2)
    assert hook.get_averaged_model().module.weight.item() == pytest.approx(2 - 0.999**2, abs=1e-6)
    assert "accumulators" not in hook.state_dict()


def test_a_supplied_copy_is_put_into_the_dtype_of_its_source(context, follow):
    """A copy that was built in another dtype is brought in line with the model at SETUP."""

    class Wide(EMAHook):
        def _build_averaged_model(self, source: nn.Module) -> AveragedModel:
            averaged = AveragedModel(source)
            averaged.module.bias.data = torch.zeros(1, dtype=torch.float64)
            return averaged

    model = nn.Linear(1, 1)
    hook = Wide()
    hook.setup(context(model))
    bias = hook.get_averaged_model().module.bias
    assert bias.dtype == torch.float32
