"""When the average moves, and by how much."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi_hooks_ema import EMAHook


def test_the_first_update_copies(primed):
    """After the first update the average is the live model."""
    hook = primed(nn.Linear(2, 1), 3.0)
    assert hook.get_averaged_model().module.weight.tolist() == [[3.0, 3.0]]
    assert (hook.num_updates, int(hook.get_averaged_model().n_averaged)) == (1, 1)


def test_every_other_update_blends(primed, fill, follow):
    """The second update gives decay * old + (1 - decay) * new."""
    model = nn.Linear(2, 1)
    hook = primed(model, 1.0, decay=0.75)
    fill(model, 3.0)
    follow(hook, model, 1)
    assert hook.get_averaged_model().module.weight.tolist() == [[1.5, 1.5]]
    assert (hook.num_updates, int(hook.get_averaged_model().n_averaged)) == (2, 2)


def test_a_fresh_shadow_copies_whatever_num_updates_says(primed):
    """A counter that was set by hand does not turn the first copy into a blend with initial weights."""
    hook = primed(nn.Linear(2, 1), 3.0, num_updates=41, decay=0.5)
    assert hook.get_averaged_model().module.weight.tolist() == [[3.0, 3.0]]
    assert hook.num_updates == 42


def test_a_counter_that_somebody_else_wrote_is_believed(primed, fill, follow):
    """Setting n_averaged back to 0 makes the next update a copy, setting it above 0 makes it a blend."""
    model = nn.Linear(2, 1)
    hook = primed(model, 1.0, decay=0.5)
    hook.get_averaged_model().n_averaged.zero_()
    fill(model, 3.0)
    follow(hook, model, 1)
    assert hook.get_averaged_model().module.weight.tolist() == [[3.0, 3.0]]
    fresh = EMAHook(decay=0.5)
    fresh.setup(TrainContext(models={"main": model}))
    fresh.get_averaged_model().n_averaged.fill_(1)
    fill(model, 5.0)
    follow(fresh, model)
    assert fresh.get_averaged_model().module.weight.tolist() == [[4.0, 4.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decay", [0.0, 0.3, 0.5, 0.9, 0.999])
def test_the_numbers_are_those_of_torch_bit_for_bit(dtype, decay, perturb, follow):
    """Twenty updates give the bits of an AveragedModel with torch's own EMA function."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(17, 33), nn.Linear(33, 5, bias=False), nn.Linear(1, 1)).to(dtype)
    expected = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    hook = EMAHook(decay=decay)
    for step in range(20):
        perturb(model, step)
        follow(hook, model, step)
        expected.update_parameters(model)
    for own, theirs in zip(hook.get_averaged_model().parameters(), expected.parameters(), strict=True):
        assert torch.equal(own, theirs)


@pytest.mark.parametrize(
    ("start_step", "update_every", "updated_after"),
    [
        (0, 1, [1, 2, 3, 4, 5, 6, 7, 8]),
        (1, 1, [1, 2, 3, 4, 5, 6, 7, 8]),
        (2, 1, [2, 3, 4, 5, 6, 7, 8]),
        (0, 3, [3, 6]),
        (4, 3, [6]),
        (6, 3, [6]),
        (5, 2, [6, 8]),
        (9, 1, []),
    ],
)
def test_updates_happen_from_start_step_on_at_multiples_of_update_every(
    start_step, update_every, updated_after, perturb, follow
):
    """With completed = step_count + 1: nothing before start_step, and nothing unless update_every divides it."""
    model = nn.Linear(2, 1)
    hook = EMAHook(start_step=start_step, update_every=update_every)
    seen = []
    for step in range(8):
        perturb(model, step)
        before = hook.num_updates
        follow(hook, model, step)
        if hook.num_updates > before:
            seen.append(step + 1)
    assert seen == updated_after
    assert hook.num_updates == len(updated_after)


def test_a_skipped_step_leaves_everything_as_it_is(primed, perturb, follow, values, same):
    """With will_skip the average does not move by a bit and no counter grows, even though the live weights changed."""
    model = nn.Linear(3, 2)
    hook = primed(model, 1.0, decay=0.5)
    before = hook.state_dict()
    perturb(model, 1)
    follow(hook, model, 1, will_skip=True)
    assert same(hook.state_dict(), before)


def test_it_acts_at_no_other_stage(primed, fill, context, same):
    """No stage but AFTER_OPTIMIZER_STEP moves the average, and none is vetoed or changes the loss."""
    model = nn.Linear(2, 1)
    hook = primed(model, 1.0, decay=0.5)
    before = hook.state_dict()
    fill(model, 9.0)
    for stage in TrainingStage:
        if stage is not TrainingStage.AFTER_OPTIMIZER_STEP:
            ctx = context(model, step=1)
            ctx.loss = torch.ones((), requires_grad=True)
            proceed, loss = hook(ctx, stage, False)
            assert proceed is True
            assert loss is ctx.loss
    assert same(hook.state_dict(), before)


def test_it_is_a_pure_observer(context, values, same):
    """Live weights, gradients, training mode, requires_grad and ctx.models are as before; no storage is shared."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model(torch.randn(4, 3)).sum().backward()
    before, gradients = values(model), [p.grad.clone() for p in model.parameters()]
    hook = EMAHook(decay=0.5)
    ctx = context(model)
    models = dict(ctx.models)
    hook(ctx, TrainingStage.SETUP)
    for _ in range(3):
        hook(ctx, TrainingStage.AFTER_OPTIMIZER_STEP, False)
    assert same(values(model), before)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert dict(ctx.models) == models
    live = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    averaged = hook.get_averaged_model()
    assert not live & {t.untyped_storage().data_ptr() for t in (*averaged.parameters(), *averaged.buffers())}


def test_the_shadow_is_in_eval_mode_and_needs_no_gradients(primed):
    """Every part of the averaged model is in eval mode, and no parameter of it requires gradients."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).train()
    averaged = primed(model, 1.0).get_averaged_model()
    assert not any(part.training for part in averaged.modules())
    assert not any(p.requires_grad for p in averaged.parameters())
    assert all(part is not averaged for part in model.modules())


def test_a_replaced_parameter_is_followed(primed, fill, follow):
    """A parameter that is exchanged for another of equal shape is averaged from then on."""
    model = nn.Linear(2, 1, bias=False)
    hook = primed(model, 0.0, decay=0.5)
    model.weight = nn.Parameter(torch.full((1, 2), 4.0))
    follow(hook, model, 1)
    assert hook.get_averaged_model().module.weight.tolist() == [[2.0, 2.0]]


def test_a_replaced_child_is_followed(primed, fill, follow):
    """A child module that is exchanged is averaged from then on."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    hook = primed(model, 0.0, decay=0.5)
    model[0] = nn.Linear(1, 1, bias=False)
    fill(model, 4.0)
    follow(hook, model, 1)
    assert hook.get_averaged_model().module[0].weight.item() == 2.0


def test_a_replaced_buffer_is_followed(follow):
    """A buffer that is assigned anew in every step is read anew in every step."""
    model = nn.BatchNorm1d(1)
    hook = EMAHook(decay=0.5)
    for step, mean in enumerate((2.0, 4.0, 8.0)):
        model.running_mean = torch.tensor([mean])
        follow(hook, model, step)
    assert hook.get_averaged_model().module.running_mean.item() == 5.5


def test_a_model_that_changes_its_layout_is_followed(follow, perturb):
    """After a change of the memory format the right elements meet each other."""
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3)
    expected = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    hook = EMAHook(decay=0.9)
    for step in range(4):
        if step == 2:
            model.to(memory_format=torch.channels_last)
        perturb(model, step)
        follow(hook, model, step)
        expected.update_parameters(model)
    assert torch.equal(hook.get_averaged_model().module.weight, expected.module.weight)


def test_a_replaced_averaged_tensor_is_found(primed, fill, follow):
    """Averaged weights that were loaded by assignment are the ones that move."""
    model = nn.Linear(1, 1, bias=False)
    hook = primed(model, 0.0, decay=0.5)
    averaged = hook.get_averaged_model()
    averaged.load_state_dict(copy.deepcopy(averaged.state_dict()), assign=True)
    fill(model, 4.0)
    follow(hook, model, 1)
    assert averaged.module.weight.item() == 2.0
    assert not averaged.module.weight.requires_grad


def test_update_parameters_of_the_averaged_model_has_the_same_numbers(primed, fill, follow):
    """A user who calls torch's own update on the averaged model gets the same rule, integer buffers copied."""
    model = nn.BatchNorm1d(1)
    averaged = primed(model, 0.0, decay=0.75).get_averaged_model()
    fill(model, 4.0)
    model.num_batches_tracked.fill_(3)
    averaged.update_parameters(model)
    assert averaged.module.weight.item() == 1.0
    assert averaged.module.num_batches_tracked.item() == 3
