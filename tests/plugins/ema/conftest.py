"""What the tests of the average share: contexts, steps by hand, and an average that is primed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi_hooks_ema import EMAHook
from nvalchemi_hooks_ema.kernels import rounded, tensorwise


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tensors are tiny here: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def context() -> Callable[..., TrainContext]:
    """Makes the context of a step: of one model, or of several by name."""

    def make(*models: nn.Module, step: int = 0, **named: nn.Module) -> TrainContext:
        return TrainContext(models={**dict(zip(("main",), models, strict=False)), **named}, step_count=step)

    return make


@pytest.fixture
def follow(context) -> Callable[..., None]:
    """Dispatches AFTER_OPTIMIZER_STEP to a hook, as after an executed step."""

    def dispatch(hook: EMAHook, model: nn.Module, step: int = 0, *, will_skip: bool = False) -> None:
        assert hook(context(model, step=step), TrainingStage.AFTER_OPTIMIZER_STEP, will_skip) == (True, None)

    return dispatch


@pytest.fixture
def fill() -> Callable[[nn.Module, float], None]:
    """Sets every floating parameter and buffer of a model."""

    @torch.no_grad()
    def set_to(model: nn.Module, value: float) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(value)

    return set_to


@pytest.fixture
def perturb() -> Callable[[nn.Module, int], None]:
    """Stands for an optimizer's step: moves every floating parameter and buffer by reproducible noise."""

    @torch.no_grad()
    def move(model: nn.Module, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype) * 0.1)

    return move


@pytest.fixture
def primed(follow, fill) -> Callable[..., EMAHook]:
    """Makes a hook whose average has taken its first copy, all weights at one value."""

    def make(model: nn.Module, value: float, **settings: object) -> EMAHook:
        fill(model, value)
        hook = EMAHook(**settings)
        follow(hook, model)
        return hook

    return make


@pytest.fixture
def values() -> Callable[[nn.Module], dict[str, torch.Tensor]]:
    """Takes a snapshot of parameters and buffers."""

    def snapshot(module: nn.Module) -> dict[str, torch.Tensor]:
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    return snapshot


@pytest.fixture
def same() -> Callable[[dict, dict], bool]:
    """Compares two snapshots or states, bit for bit."""

    def compare(one: dict, other: dict) -> bool:
        if set(one) != set(other):
            return False
        return all(
            compare(value, other[name])
            if isinstance(value, dict)
            else torch.equal(value, other[name]) and value.dtype == other[name].dtype
            if isinstance(value, torch.Tensor)
            else value == other[name]
            for name, value in one.items()
        )

    return compare


@pytest.fixture
def tensors() -> Callable[[torch.dtype, int], list[torch.Tensor]]:
    """Makes reproducible tensors of many shapes: whole vectors, tails, scalars, nothing at all."""

    def make(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shapes = [(), (1,), (7,), (0,), (3, 5), (1031,), (2, 3, 4)]
        return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]

    return make


@pytest.fixture
def blend_rounded_() -> Callable[..., None]:
    """Runs a low-precision blend on a kernel for float32."""

    def blend(kernel, accumulators, averages, values, weight, veto=None) -> None:
        if kernel is tensorwise:
            tensorwise.blend_rounded_(accumulators, averages, values, weight, veto)
        else:
            room = rounded.room_for([accumulators])[0]
            rounded.blend_(kernel.blend_, accumulators, averages, values, room, weight, veto)

    return blend
