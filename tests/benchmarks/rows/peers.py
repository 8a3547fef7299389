"""Others, doing the same work: each is None where it is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from time import process_time
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rows.pipelines import DECAY, MAX_NORM
from rows.timing import Contestant, calls
from rows.tiny import BATCH, adamw, loss_of, mlp

__all__ = ["averages", "ignite", "loops"]

Step = Callable[[], object]


def loops(quick: bool) -> Mapping[str, Contestant | None]:
    """Return whole steps with clipping and averaging; in a hurry only those that are imported at once."""
    every = {
        "GradScaler + AveragedModel": calls(torch_amp()),
        "AveragedModel": calls(averaging(lambda model: _averaged_model(model))),
        "torch-ema": _if_installed("torch_ema", lambda: calls(averaging(_torch_ema))),
        "ema-pytorch": _if_installed("ema_pytorch", lambda: calls(averaging(_ema_pytorch))),
        "accelerate": _if_installed("accelerate", lambda: calls(accelerate())),
    }
    if not quick:
        every["ignite"] = ignite(averaging(_lerp))
        every["Lightning Fabric"] = _if_installed("lightning", lambda: calls(fabric()))
        every["Lightning Trainer"] = _if_installed("lightning", trainer)
    return every


def averages(model: nn.Module) -> Mapping[str, Contestant | None]:
    """Return updates of an average alone."""
    return {
        "torch-ema": _if_installed("torch_ema", lambda: calls(_torch_ema(model))),
        "ema-pytorch": _if_installed("ema_pytorch", lambda: calls(_ema_pytorch(model))),
    }


def _if_installed(package: str, make: Callable[[], Contestant]) -> Contestant | None:
    return make() if importlib.util.find_spec(package) else None


# Averages of a model: each returns what updates it.


def _averaged_model(model: nn.Module) -> Step:
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    return lambda: averaged.update_parameters(model)


def _torch_ema(model: nn.Module) -> Step:
    from torch_ema import ExponentialMovingAverage

    return ExponentialMovingAverage(model.parameters(), decay=DECAY).update


def _ema_pytorch(model: nn.Module) -> Step:
    from ema_pytorch import EMA

    # Averages from its first call on, at every call, as the others do.
    average = EMA(model, beta=DECAY, update_after_step=0, update_every=1, include_online_model=False)
    return average.update


def _lerp(model: nn.Module) -> Step:
    parameters = list(model.parameters())
    kept = [parameter.detach().clone() for parameter in parameters]

    def update() -> None:
        with torch.no_grad():
            torch._foreach_lerp_(kept, parameters, 1 - DECAY)

    return update


# Whole steps.


def averaging(average: Callable[[nn.Module], Step]) -> Step:
    """Return the raw loop with another average."""
    model, (x, y) = mlp(), BATCH
    optimizer, update = adamw(model), average(model)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        update()

    return step


def torch_amp() -> Step:
    """Return the loop of torch's documentation: what our four plugins do."""
    model, (x, y) = mlp(), BATCH
    optimizer, update, scaler = adamw(model), _averaged_model(model), torch.amp.GradScaler("cpu")

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(model(x), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        update()

    return step


def ignite(step: Step) -> Contestant | None:
    """Return a step inside of an ignite Engine."""
    if not importlib.util.find_spec("ignite"):
        return None
    from ignite.engine import Engine

    engine = Engine(lambda engine, batch: step())

    def run(times: int) -> float:
        begin = process_time()
        engine.run([BATCH] * times, max_epochs=1)
        return process_time() - begin

    return run


def accelerate() -> Step:
    """Return a step of accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    x, y = BATCH
    plain = mlp()
    model, optimizer = accelerator.prepare(plain, adamw(plain))
    update = _lerp(plain)

    def step() -> None:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        update()

    return step


def fabric() -> Step:
    """Return a step of Lightning Fabric."""
    from lightning.fabric import Fabric

    one = Fabric(accelerator="cpu", devices=1)
    x, y = BATCH
    plain = mlp()
    model, optimizer = one.setup(plain, adamw(plain))
    update = _lerp(plain)

    def step() -> None:
        optimizer.zero_grad()
        one.backward(loss_of(model(x), y))
        one.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        optimizer.step()
        update()

    return step


def trainer() -> Contestant:
    """Return steps of the Lightning Trainer at its barest, with an average in a hook; its start is not counted."""
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = mlp()
            self.averaged = _lerp(self.model)

        def training_step(self, batch: Any, number: int) -> Any:
            return loss_of(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return adamw(self.model)

        def on_train_batch_start(self, batch: Any, number: int) -> None:
            if number == 0:
                self.begin = process_time()

        def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
            self.averaged()
            self.end = process_time()

    module = Module()

    def run(times: int) -> float:
        fit = Trainer(accelerator="cpu", max_epochs=1, gradient_clip_val=MAX_NORM, barebones=True).fit
        fit(module, _batches(times))
        return float(module.end - module.begin)

    return run


def _batches(times: int) -> Iterable[Any]:
    return torch.utils.data.DataLoader([BATCH] * times, batch_size=None)
