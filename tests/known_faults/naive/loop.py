"""A loop by hand, as careful as a user can be, in small steps of which each can go wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Average", "Loop"]


class Average:
    """An average of a model: float32 inside, buffers by policy, names of the bare model."""

    def __init__(self, model: nn.Module, decay: float = 0.999, use_buffers: bool = True) -> None:
        self.module = self.copy_of(model)
        self.decay, self.use_buffers, self.updates = decay, use_buffers, 0
        self.exact: dict[str, Tensor] = {}

    def copy_of(self, model: nn.Module) -> nn.Module:
        """Return what becomes the average."""
        return copy.deepcopy(model).eval().requires_grad_(False)

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return what is averaged, by name."""
        return dict(model.named_parameters()) | dict(model.named_buffers())

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Follow the live model."""
        live, parameters = self.tensors(model), dict(model.named_parameters())
        for name, average in self.tensors(self.module).items():
            if self.updates and average.is_floating_point() and (self.use_buffers or name in parameters):
                exact = self.exact.setdefault(name, average.float())
                average.copy_(exact.lerp_(live[name].float(), 1 - self.decay))
            else:
                average.copy_(live[name])
        self.updates += 1

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        return {"module": self.module.state_dict(), "updates": self.updates, "exact": self.exact}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.module.load_state_dict(state["module"])
        self.updates, self.exact = state["updates"], state["exact"]


class Loop:
    """Trains a model by hand; the arguments are those of the run that it stands for."""

    average = Average

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Callable[[Any, Any], Any] = lambda predictions, batch: predictions,
        optimizer: str = "SGD",
        options: dict[str, Any] | None = None,
        scheduler: bool = False,
        spread: str = "one",
        ema: dict[str, Any] | None = None,
        clip: dict[str, Any] | None = None,
        scale: dict[str, Any] | None = None,
        torch_scaler: dict[str, Any] | None = None,
        precision: str | None = None,
        accumulate: dict[str, Any] | None = None,
        veto: Sequence[int] = (),
        checkpoints: Path | None = None,
        **_: Any,
    ) -> None:
        self.live, self.loss, self.veto, self.checkpoints = model, loss, veto, checkpoints
        make = getattr(torch.optim, optimizer)
        self.optimizers = [make(group, **(options or {"lr": 1.0})) for group in self.spread(spread)]
        self.schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in self.optimizers if scheduler]
        scaling = scale if scale is not None else torch_scaler if precision != "fp16" else {}
        self.autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision or "")
        self.scaler = torch.amp.GradScaler("cpu", **(scaling or {}), enabled=scaling is not None)
        self.shadow_of = None if ema is None else self.average(model, **ema)
        self.clipping, self.window = clip, (accumulate or {}).get("steps", 1)
        self.weight = (accumulate or {}).get("weight")
        self.batches = self.steps = self.in_window = 0
        self.norm_before_clipping = float("nan")

    def spread(self, how: str) -> list[Any]:
        """Return what each optimizer gets."""
        parameters = list(self.live.parameters())
        if how == "optimizers":
            return [[parameter] for parameter in parameters]
        if how == "first":
            return [parameters[:1]]
        return [[{"params": [parameter]} for parameter in parameters] if how == "groups" else parameters]

    def epoch(self, batches: Iterable[Any]) -> None:
        """Train on a pass over batches; the last window may be shorter."""
        batches = list(batches)
        for place, batch in enumerate(batches):
            self.step(batch, batches[place:][: self.window])

    def step(self, batch: Any, rest: Sequence[Any] = ()) -> SimpleNamespace:
        """Train on a batch."""
        if not self.in_window:
            self.size, self.held = min(self.window, len(rest) or self.window), 0.0
            self.forget()
        with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None):
            loss = self.loss(self.live(batch), batch)
        self.held += self.share(batch)
        self.backward(self.scaler.scale(loss * self.share(batch)))
        self.batches += 1
        self.in_window += 1
        skipped = True
        if self.in_window == self.size:
            skipped = not self.attempt()
            self.in_window = 0
        self.after_batch()
        return SimpleNamespace(loss=loss.detach(), step_skipped=skipped)

    def share(self, batch: Any) -> float:
        """Return what a batch counts for in its window."""
        return 1.0 if self.weight is None else batch[self.weight]

    def backward(self, loss: Tensor) -> None:
        """Compute gradients."""
        loss.backward()

    def attempt(self) -> bool:
        """Step, unless something is against it."""
        used = [one for one in self.optimizers if any(p.grad is not None for p in parameters_of(one))]
        before = self.scaler.get_scale()
        for optimizer in used:
            self.scaler.unscale_(optimizer)
        for parameter in (p for one in used for p in parameters_of(one) if p.grad is not None):
            parameter.grad.div_(self.held)
        finite = all(bool(p.grad.isfinite().all()) for one in used for p in parameters_of(one) if p.grad is not None)
        if finite and self.clipping is not None:
            self.clip()
        vetoed = self.batches - 1 in self.veto
        if finite and not vetoed:
            for optimizer in used:
                self.scaler.step(optimizer)
        self.close_scaler(before if finite and vetoed else None)
        if finite and not vetoed:
            self.stepped()
            return True
        self.skipped()
        return False

    def clip(self) -> None:
        """Clip all gradients by one norm."""
        parameters = [p for one in self.optimizers for p in parameters_of(one)]
        self.norm_before_clipping = float(nn.utils.clip_grad_norm_(parameters, self.clipping["max_norm"]))

    def close_scaler(self, keep: float | None) -> None:
        """Let the scale grow or back off, once a window."""
        self.scaler.update(keep)

    def stepped(self) -> None:
        """Do what follows a step."""
        self.steps += 1
        for scheduler in self.schedulers:
            scheduler.step()
        if self.shadow_of is not None:
            self.shadow_of.update(self.live)
        self.keep()

    def keep(self) -> None:
        """Write a checkpoint, if there are to be any."""
        if self.checkpoints is not None:
            self.save(self.checkpoints)

    def skipped(self) -> None:
        """Do what follows a step that was not taken."""

    def forget(self) -> None:
        """Begin a window without gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def after_batch(self) -> None:
        """Do what follows a batch."""

    def average_of(self, name: str) -> float:
        """Return an averaged parameter."""
        return self.shadow.get_parameter(name).item()

    def finish(self) -> None:
        """Wait for what is still under way: nothing is."""

    def prime_average(self) -> None:
        """Let the average begin with the weights as they are."""
        self.shadow_of.update(self.live)

    def wrap(self, wrapper: Callable[[nn.Module], nn.Module]) -> None:
        """Wrap the model in the middle of a run."""
        self.live = wrapper(self.live)

    def evaluate(self, batches: list[Any]) -> float:
        """Return the loss of the averaged weights."""
        return sum(float(self.loss(self.shadow(batch), batch)) for batch in batches) / len(batches)

    @property
    def shadow(self) -> nn.Module:
        """The averaged model."""
        return self.shadow_of.module

    @property
    def updates(self) -> int:
        """Updates of the average."""
        return self.shadow_of.updates

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.optimizers[0].param_groups[0]["lr"]

    @property
    def scale(self) -> float:
        """The loss scale of the next batch."""
        return self.scaler.get_scale()

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        return {
            "live": self.live.state_dict(),
            "shadow": None if self.shadow_of is None else self.shadow_of.state(),
            "optimizers": [one.state_dict() for one in self.optimizers],
            "schedulers": [one.state_dict() for one in self.schedulers],
            "scaler": self.scaler.state_dict(),
            "counters": (self.steps, self.batches),
        }

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        torch.save(self.state(), path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        self.go_on(torch.load(path))

    def go_on(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        self.live.load_state_dict(state["live"])
        if self.shadow_of is not None:
            self.shadow_of.load(state["shadow"])
        for one, saved in zip(
            [*self.optimizers, *self.schedulers], [*state["optimizers"], *state["schedulers"]], strict=True
        ):
            one.load_state_dict(saved)
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.steps, self.batches = state["counters"]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
