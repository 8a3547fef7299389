"""Wrappers around the live model, in every order."""

from __future__ import annotations

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from nvalchemi_hooks_ema import EMAHook


class Wrapper(nn.Module):
    """Knows nothing but its module: what a hand-made data-parallel wrapper looks like."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


class Doubles(nn.Module):
    """A model of a user who calls a child `module`; it is no wrapper, for it does something."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(1, 1, bias=False)

    def forward(self, x):
        return 2 * self.module(x)


@pytest.fixture
def data_parallel(tmp_path):
    """Wraps in DistributedDataParallel, in a process group of one."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield DistributedDataParallel
    distributed.destroy_process_group()


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def bare(model: nn.Module) -> nn.Module:
    return model


def average_over(first, second, fill, follow) -> EMAHook:
    """One copy of zeros through `first`, one blend with ones through `second`."""
    model = nn.Linear(2, 1)
    hook = EMAHook(decay=0.5)
    for step, wrap in enumerate((first, second)):
        fill(model, float(step))
        follow(hook, wrap(model), step)
    return hook


def assert_is_half_and_bare(hook: EMAHook) -> None:
    assert hook.get_averaged_model().module.weight.tolist() == [[0.5, 0.5]]
    state = hook.state_dict()["averaged_model_state"]
    assert sorted(state) == ["module.bias", "module.weight", "n_averaged"]
    weights = {name.removeprefix("module."): value for name, value in state.items() if name != "n_averaged"}
    nn.Linear(2, 1).load_state_dict(weights, strict=True)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (bare, compiled),
        (compiled, bare),
        (bare, nn.DataParallel),
        (nn.DataParallel, bare),
        (compiled, nn.DataParallel),
        (lambda model: compiled(nn.DataParallel(model)), bare),
        (lambda model: nn.DataParallel(compiled(model)), compiled),
        (bare, Wrapper),
        (Wrapper, bare),
        (bare, lambda model: Wrapper(Wrapper(model))),
        (Wrapper, lambda model: compiled(model)),
    ],
)
def test_the_order_of_wrapping_does_not_matter(first, second, fill, follow):
    """Built through one wrapper and updated through another: same numbers, and the names of the bare model."""
    assert_is_half_and_bare(average_over(first, second, fill, follow))


def test_distributed_data_parallel_is_unwrapped(data_parallel, fill, follow):
    """DDP may come before or after the average is built, compiled or not."""
    for first, second in ((bare, data_parallel), (data_parallel, bare), (data_parallel, data_parallel)):
        assert_is_half_and_bare(average_over(first, second, fill, follow))
    assert_is_half_and_bare(average_over(lambda m: compiled(data_parallel(m)), bare, fill, follow))


def test_a_users_attribute_called_module_is_no_wrapper(follow, fill):
    """The averaged model of a model with a child called `module` computes what the model computes."""
    model, hook = Doubles(), EMAHook(decay=0.5)
    for step, value in enumerate((0.0, 1.0)):
        fill(model, value)
        follow(hook, model, step)
    averaged = hook.get_averaged_model()
    assert isinstance(averaged.module, Doubles)
    assert averaged(torch.ones(1, 1)).item() == 1.0
    assert sorted(hook.state_dict()["averaged_model_state"]) == ["module.module.weight", "n_averaged"]


def test_accumulators_are_renamed_with_the_weights(follow, fill):
    """A bfloat16 model that loses its wrapper keeps its exact average."""
    model, hook = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16), EMAHook(decay=0.999)
    fill(model, 1.0)
    follow(hook, Wrapper(model), 0)
    fill(model, 2.0)
    follow(hook, Wrapper(model), 1)
    follow(hook, model, 2)
    assert hook.state_dict()["accumulators"]["weight"].item() == pytest.approx(2 - 0.999**2, abs=1e-6)


@pytest.mark.parametrize(("saved_from", "loaded_into"), [(Wrapper, bare), (bare, Wrapper)])
def test_a_state_loads_across_a_wrapper(saved_from, loaded_into, follow, fill):
    """A state saved with a hand-made wrapper around the model loads without it, and the other way round."""
    model, hook = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16), EMAHook(decay=0.5)
    fill(model, 1.0)
    follow(hook, saved_from(model), 0)
    other, resumed = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16), EMAHook(decay=0.5)
    resumed.load_state_dict(hook.state_dict())
    fill(other, 3.0)
    follow(resumed, loaded_into(other), 1)
    averaged = dict(resumed.get_averaged_model().module.named_parameters())
    assert [parameter.item() for parameter in averaged.values()] == [2.0]
