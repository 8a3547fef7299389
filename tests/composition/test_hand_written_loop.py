"""All four plugins against the loop that they replace, written by hand."""

from __future__ import annotations

import copy

import pytest
import torch

from nvalchemi.training import EMAHook, GradientClipHook, GradScalerVetoHook, LossScalingHook

STEPS, POISONED = 200, (7, 8, 120)
MAX_NORM, DECAY, INTERVAL = 0.5, 0.99, 40


class HandWritten:
    """zero_grad, forward, scaled backward, unscale, check, clip, step, scheduler, EMA: one by one."""

    def __init__(self, model, optimizer, scheduler):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.scale, self.good_steps = 1024.0, 0
        self.average = copy.deepcopy(model)
        self.averaged_steps = 0

    def step(self, x, y):
        """Take one batch; return whether its step was skipped."""
        self.optimizer.zero_grad()
        loss = (self.model(x) - y).square().mean()
        (loss * self.scale).backward()
        gradients = [parameter.grad for parameter in self.model.parameters()]
        for gradient in gradients:
            gradient.div_(self.scale)
        if not all(torch.isfinite(gradient).all() for gradient in gradients):
            self.scale, self.good_steps = self.scale / 2, 0
            return True
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.scheduler.step()
        self.good_steps += 1
        if self.good_steps == INTERVAL:
            self.scale, self.good_steps = self.scale * 2, 0
        weight = 1.0 if self.averaged_steps == 0 else 1 - DECAY
        with torch.no_grad():
            for averaged, live in zip(self.average.parameters(), self.model.parameters(), strict=True):
                averaged.lerp_(live, weight)
        self.averaged_steps += 1
        return False


def _hooks():
    return [
        EMAHook(decay=DECAY),
        GradientClipHook(max_norm=MAX_NORM),
        LossScalingHook(init_scale=1024.0, growth_interval=INTERVAL),
        GradScalerVetoHook(),
    ]


def _optimizer(name, model):
    kind, options = {"sgd": (torch.optim.SGD, {"momentum": 0.9}), "adamw": (torch.optim.AdamW, {"weight_decay": 0.01})}[
        name.removeprefix("fused ")
    ]
    return kind(model.parameters(), lr=0.05, fused=name.startswith("fused") or None, **options)


OPTIMIZERS = ["sgd", "adamw", "fused sgd", "fused adamw"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_four_plugins_equal_a_hand_written_loop_in_float64(name, make_model, make_batches, train, weights):
    """A run with all four plugins equals a hand-written loop to 1e-12 in float64: 200 steps, 3 of them with an inf."""
    batches = make_batches(STEPS, poisoned=POISONED, dtype=torch.float64)
    ours, theirs = make_model(torch.float64), make_model(torch.float64)
    optimizer, hooks = _optimizer(name, ours), _hooks()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30, 0.5)
    skipped = train(ours, batches, hooks, optimizer, scheduler)

    reference = _optimizer(name, theirs)
    by_hand = HandWritten(theirs, reference, torch.optim.lr_scheduler.StepLR(reference, 30, 0.5))
    assert skipped == [by_hand.step(x, y) for x, y in batches]

    assert [number for number, skip in enumerate(skipped) if skip] == list(POISONED)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        weights(hooks[0].get_averaged_model().module), weights(by_hand.average), rtol=0, atol=1e-12
    )
    assert scheduler.get_last_lr() == by_hand.scheduler.get_last_lr()
    assert hooks[2].scaler.get_scale() == by_hand.scale
    assert hooks[0].num_updates == by_hand.averaged_steps == STEPS - len(POISONED)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_step_equals_a_hand_written_one_in_float32(name, make_model, make_batches, train, weights):
    """From equal state, each of 200 steps equals a hand-written one to 1e-6 in float32, 3 of them with an inf."""
    batches = make_batches(STEPS, poisoned=POISONED)
    ours, theirs = make_model(), make_model()
    optimizer, hooks = _optimizer(name, ours), _hooks()
    reference = _optimizer(name, theirs)
    by_hand = HandWritten(theirs, reference, torch.optim.lr_scheduler.StepLR(reference, 10**6))
    for x, y in batches:
        theirs.load_state_dict(ours.state_dict())
        reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if by_hand.averaged_steps:
            by_hand.average.load_state_dict(hooks[0].get_averaged_model().module.state_dict())
        assert train(ours, [(x, y)], hooks, optimizer) == [by_hand.step(x, y)]
        torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-6, atol=1e-6)
        if by_hand.averaged_steps:
            torch.testing.assert_close(
                weights(hooks[0].get_averaged_model().module), weights(by_hand.average), rtol=1e-6, atol=1e-6
            )
