"""Entries 19 to 27: the norm that is compared with a threshold, and what it is done to."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from nvalchemi.errors import NonFiniteGradientError

INF = math.inf
WAYS = [
    pytest.param({}, id="plain"),
    pytest.param({"lazy": True}, id="lazy"),
    pytest.param({"options": {"lr": 1.0, "fused": True}}, id="folded"),
    pytest.param({"options": {"lr": 1.0, "fused": True}, "lazy": True}, id="folded, lazy"),
]
ONE = {"max_norm": 1.0}


def length(model: nn.Module) -> float:
    """The norm of all parameters; after one step from 0 with learning rate 1 it is the norm of the gradients."""
    return float(torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()]).norm())


@pytest.mark.fault(naive="ClipsScaledGradients", shows="5120")
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("turned", [False, True], ids=["clip first", "scale first"])
@pytest.mark.parametrize("scaler", ["scale", "torch_scaler"])
def test_a19_the_threshold_is_compared_with_true_gradients(way, point, how, turned, scaler):
    """Gradients are unscaled before they are clipped, in whatever order the hooks were given.

    Gradients (3, 4) under a scale of 1024: the norm is 5, and a limit of 1 leaves (0.6, 0.8).
    """
    run = way(point(w=[0.0, 0.0]), clip=ONE, turned=turned, **{scaler: {"init_scale": 1024.0}}, **how)
    run.step({"w": [3.0, 4.0]})
    assert run.norm_before_clipping == 5.0
    assert run.live.w.tolist() == pytest.approx([-0.6, -0.8], rel=1e-6)


@pytest.mark.fault(naive="ClipsEveryMicroBatch", shows="-0.2425")
@pytest.mark.parametrize("how", WAYS)
def test_a20_a_window_is_clipped_once(way, point, how):
    """Micro-batches are summed up whole, and their sum is clipped just before the step.

    (3, 0) and (0, 4), a limit of 1: the direction is (3, 4), so (0.6, 0.8).
    """
    run = way(point(w=[0.0, 0.0]), clip=ONE, accumulate={"steps": 2}, **how)
    for gradient in ([3.0, 0.0], [0.0, 4.0]):
        run.step({"w": gradient})
    assert [round(w, 4) for w in run.live.w.tolist()] == [-0.6, -0.8]


@pytest.mark.fault(naive="UnscalesEveryMicroBatch", raises=RuntimeError, shows="unscale_() has already been called")
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("scaler", ["scale", "torch_scaler"])
def test_a21_gradients_are_unscaled_once_a_window(way, point, how, scaler):
    """A window of 4 over 3 batches, clipped and watched under a scale: one step, and one division by the scale.

    The mean of three gradients (3, 4) has the norm 5; clipped to 1 it is (0.6, 0.8).
    """
    run = way(point(w=[0.0, 0.0]), clip=ONE, accumulate={"steps": 4}, **{scaler: {"init_scale": 1024.0}}, **how)
    run.epoch([{"w": [3.0, 4.0]}] * 3)
    assert run.steps == 1
    assert run.norm_before_clipping == pytest.approx(5.0, rel=1e-6)
    assert run.live.w.tolist() == pytest.approx([-0.6, -0.8], rel=1e-5)


@pytest.mark.parametrize("scaler", ["scale", "torch_scaler"])
def test_a21_whoever_reads_true_gradients_shares_the_one_unscaling(point, ours, scaler):
    """A monitor before clipping and one after it read gradients and norm; all of them are true, and nothing raises."""
    seen = []

    class Monitor:
        frequency = 1

        def __init__(self, stage):
            self.stage = stage

        def __call__(self, ctx, stage):
            seen.append((ctx.gradients["w"].tolist(), float(ctx.grad_norm)))

    from nvalchemi.training import TrainingStage

    monitors = [Monitor(TrainingStage.AFTER_BACKWARD), Monitor(TrainingStage.BEFORE_OPTIMIZER_STEP)]
    run = ours(point(w=[0.0, 0.0]), clip={"max_norm": 10.0}, hooks=monitors, **{scaler: {"init_scale": 1024.0}})
    for _ in range(2):
        run.step({"w": [3.0, 4.0]})
    assert seen == [([3.0, 4.0], 5.0)] * 4


@pytest.mark.fault(naive="StepsOnANormThatIsNotFinite", shows="nan")
@pytest.mark.parametrize("bad", [INF, math.nan])
@pytest.mark.parametrize("scale", [None, {"init_scale": 8.0}], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("clip", [ONE, {"max_norm": 1.0, "per_optimizer": True}], ids=["global", "per optimizer"])
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("SGD", {"lr": 0.5, "momentum": 0.9}),
        ("SGD", {"lr": 0.5, "momentum": 0.9, "fused": True}),
        ("AdamW", {"lr": 0.5}),
        ("AdamW", {"lr": 0.5, "fused": True}),
    ],
)
def test_a22_a_norm_that_is_not_finite_is_a_veto(way, point, optimizer, options, lazy, clip, scale, bad):
    """A window with an inf or a nan leaves weights and optimizer states of all optimizers as they were, bit for bit.

    The vetoed window comes first, and again after a step: the run is that of the two good windows alone.
    """
    given = {"optimizer": optimizer, "options": options, "clip": clip, "scale": scale, "lazy": lazy}
    gradients = {"v": [1.0, 2.0], "w": 3.0}
    runs = [way(point(v=[1.0, 2.0], w=3.0), spread="optimizers", **given) for _ in range(2)]
    for run, batches in zip(runs, [[{"v": [bad, 1.0], "w": 2.0}, gradients] * 2, [gradients] * 2], strict=True):
        for batch in batches:
            run.step(batch)
    one, other = ([run.live.state_dict(), *(o.state_dict()["state"] for o in run.optimizers)] for run in runs)
    assert str(one) == str(other)
    assert runs[0].steps == 2


def test_a22_a_norm_that_is_not_finite_is_an_error_when_asked_for(point, ours):
    """With error_if_nonfinite the parameter is named, before anything moves."""
    run = ours(point(v=1.0, w=2.0), clip={"max_norm": 1.0, "error_if_nonfinite": True})
    with pytest.raises(NonFiniteGradientError, match="'w'"):
        run.step({"v": 1.0, "w": INF})
    assert (run.live.v.item(), run.live.w.item()) == (1.0, 2.0)


def test_a22_a_norm_that_overflows_though_its_elements_are_finite_is_a_veto_too(point, ours):
    """Three gradients of 3e38 have a norm above the largest float32: nothing moves, instead of by zeros."""
    run = ours(point(w=[1.0, 1.0, 1.0]), clip=ONE)
    assert run.step({"w": [3e38] * 3}).step_skipped
    assert run.live.w.tolist() == [1.0] * 3


class GivesAGenerator(nn.Module):
    """A model whose parameters can be iterated over once only by each that asks."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, gradients):
        return (self.w * torch.tensor(gradients)).sum()


@pytest.mark.fault(naive="KeepsAGenerator", shows="10.0")
@pytest.mark.parametrize("how", WAYS)
def test_a23_parameters_given_as_a_generator_are_clipped_in_every_window(way, how):
    """The second window is clipped as the first: each moves the weights by 1, of a gradient of norm 10."""
    run = way(GivesAGenerator(), clip=ONE, **how)
    moves, before = [], torch.zeros(2)
    for _ in range(2):
        run.step([6.0, 8.0])
        moves.append(float((run.live.w.detach() - before).norm()))
        before = run.live.w.detach().clone()
    assert moves == pytest.approx([1.0, 1.0], rel=1e-5)


@pytest.mark.fault(naive="KnowsDenseGradientsOnly", raises=NotImplementedError, shows="SparseCPU", careful=False)
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_a24_sparse_gradients_are_clipped_by_their_true_norm(way, lazy):
    """Entries of one row are added up before they are measured.

    Rows 1, 1, 2 of width 4 in a sum: gradients of 2 and 1, the norm is sqrt(4 * 4 + 4 * 1) = sqrt(20).
    """
    model = nn.Embedding(10, 4, sparse=True)
    nn.init.zeros_(model.weight)
    run = way(model, loss=lambda predictions, batch: predictions.sum(), clip=ONE, lazy=lazy)
    run.step(torch.tensor([1, 1, 2]))
    assert run.norm_before_clipping == pytest.approx(math.sqrt(20), rel=1e-6)
    assert length(run.live) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.fault(naive="TakesAnyThreshold", raises=pytest.fail.Exception, shows="DID NOT RAISE", careful=False)
@pytest.mark.parametrize("bad", [0, 0.0, -1.0, math.nan, -INF, True, "1.0"])
@pytest.mark.parametrize("setting", ["max_norm", "clip_value", "norm_type"])
def test_a25_a_bad_threshold_is_refused_when_the_hook_is_built(way, point, setting, bad):
    """0, negative numbers, nan, bools and strings are refused by name, before anything is trained."""
    with pytest.raises(ValueError, match=setting):
        way(point(w=[0.0, 0.0]), clip={setting: bad})


def test_a25_inf_only_measures(point, ours):
    """A limit of inf changes no gradient and gives the norm."""
    run = ours(point(w=[0.0, 0.0]), clip={"max_norm": INF})
    run.step({"w": [3.0, 4.0]})
    assert (run.live.w.tolist(), run.norm_before_clipping) == ([-3.0, -4.0], 5.0)


@pytest.mark.fault(naive="StacksWhateverNormsThereAre", raises=RuntimeError, shows="non-empty TensorList")
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_a26_no_gradients_have_the_norm_zero(way, point, lazy):
    """Where the loss reaches no optimized parameter the norm is 0 and nothing raises."""
    run = way(point(v=1.0, w=1.0), spread="first", clip=ONE, lazy=lazy)
    run.step({"w": 1.0})
    assert run.live.v.item() == 1.0
    assert run.norm_before_clipping == 0.0


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_a26_one_norm_spans_all_dtypes(point, ours, half, lazy):
    """A half-precision gradient of 3 and a float32 one of 4 have the norm 5; one that is missing changes nothing."""
    run = ours(point(v=torch.zeros((), dtype=half), w=0.0, z=7.0), clip=ONE, lazy=lazy)
    run.step({"v": 3.0, "w": 4.0})
    assert run.norm_before_clipping == 5.0
    assert run.live.v.item() == pytest.approx(-0.6, rel=2 * torch.finfo(half).eps)
    assert run.live.w.item() == pytest.approx(-0.8, rel=1e-6)
    assert run.live.z.item() == 7.0


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_a26_the_norm_of_fp16_gradients_is_taken_in_float32(point, ours, lazy):
    """Two fp16 gradients of 60000 have a norm of 84853, which fp16 could not hold: no veto, and a length of 1."""
    run = ours(point(w=torch.zeros(2, dtype=torch.float16)), clip=ONE, lazy=lazy)
    assert not run.step({"w": [60000.0, 60000.0]}).step_skipped
    assert run.norm_before_clipping == pytest.approx(60000 * math.sqrt(2), rel=1e-3)
    assert length(run.live) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.fault(naive="ClipsEachParameterByItself", shows="[-1.0, -1.0]")
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("spread", ["one", "groups", "optimizers"])
def test_a27_one_norm_spans_groups_and_optimizers(way, point, spread, how):
    """Gradients of 3 and 4 keep their direction under a limit of 1, wherever the parameters are: 0.6 and 0.8."""
    run = way(point(v=0.0, w=0.0), spread=spread, clip=ONE, **how)
    run.step({"v": 3.0, "w": 4.0})
    assert [round(parameter.item(), 5) for parameter in run.live.parameters()] == [-0.6, -0.8]


def test_a27_each_optimizer_has_its_own_norm_when_asked_for(point, ours):
    """With per_optimizer each optimizer is clipped by itself, and its groups together."""
    moved = []
    for spread in ("groups", "optimizers"):
        run = ours(point(v=0.0, w=0.0), spread=spread, clip={"max_norm": 1.0, "per_optimizer": True})
        run.step({"v": 3.0, "w": 4.0})
        moved.append([round(parameter.item(), 5) for parameter in run.live.parameters()])
    assert moved == [[-0.6, -0.8], [-1.0, -1.0]]


@pytest.mark.parametrize("clip", [None, ONE], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_a24_an_overflow_in_a_sparse_gradient_is_a_veto(ours, clip, lazy):
    """An inf in one row of an embedding leaves all of it as it was, and the scale backs off once."""
    model = nn.Embedding(4, 2, sparse=True)
    nn.init.zeros_(model.weight)
    run = ours(model, loss=lambda y, batch: (y * batch[1]).sum(), clip=clip, check=True,
               scale={"init_scale": 8.0}, lazy=lazy, training_fn=lambda model, batch: model(batch[0]))  # fmt: skip
    assert run.step((torch.tensor([1, 1]), torch.tensor([[INF], [1.0]]))).step_skipped
    assert (length(run.live), run.scale) == (0.0, 4.0)
    run.step((torch.tensor([1, 1]), torch.tensor([[1.0], [1.0]])))
    assert length(run.live) > 0


@pytest.mark.parametrize("how", WAYS)
def test_a22_a_micro_batch_that_is_not_finite_is_a_veto_of_its_window(point, ours, how):
    """An inf in the first of two micro-batches is there when the norm is taken; the next window is clean."""
    run = ours(point(w=[1.0, 1.0]), clip=ONE, accumulate={"steps": 2}, **how)
    for gradient in ([INF, 0.0], [1.0, 1.0], [0.3, 0.4], [0.3, 0.4]):
        run.step({"w": gradient})
    lr = run.lr
    assert run.live.w.tolist() == pytest.approx([1 - 0.3 * lr, 1 - 0.4 * lr])
    assert run.steps == 1


@pytest.mark.parametrize("scaler", ["scale", "torch_scaler"])
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_a22_a_norm_that_overflows_backs_off_once(point, ours, scaler, lazy):
    """Under a loss scale a norm above the largest float32 halves the scale, though each gradient is finite."""
    run = ours(point(w=[1.0, 1.0, 1.0]), clip=ONE, lazy=lazy, **{scaler: {"init_scale": 1.0}})
    run.step({"w": [3e38] * 3})
    assert (run.scale, run.live.w.tolist()) == (0.5, [1.0] * 3)
