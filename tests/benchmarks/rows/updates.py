"""The update alone and the average alone, of many weights and of many tiny tensors."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from nvalchemi.hooks import TrainContext
from nvalchemi.training import EMAHook
from rows import peers
from rows.figures import Figure
from rows.pipelines import DECAY, Naive, Ours, Update, updates
from rows.targets import TARGETS
from rows.timing import Contestant, Effort, calls, compare

__all__ = ["ema", "paths"]

TENSORS, LARGE, TINY = 200, 100_000, 16


def ema(quick: bool) -> Iterator[Figure]:
    """Measure the update of an average."""
    efforts = {
        "large": (LARGE, Effort(rounds=7 if quick else 21, slice=0, warm_up=3)),
        "tiny": (TINY, Effort(rounds=11 if quick else 41, slice=0.01)),
    }
    for name, (elements, effort) in efforts.items():
        model = Update(TENSORS, elements).model
        others = peers.averages(model)
        contestants = {"ours": _ours(model)} | {n: one for n, one in others.items() if one}
        ratios = compare(_averaged_model(model), contestants, effort)
        beside = {n: ratios[n].median if n in ratios else None for n in others}
        ours = ratios["ours"]
        yield Figure(TARGETS[f"ema {name}"], ours.median, (ours.low, ours.high), beside)


def paths(quick: bool) -> Iterator[Figure]:
    """Measure all that happens from scaled gradients to the averaged weights."""
    large = Effort(rounds=3 if quick else 15, slice=0, warm_up=1)
    tiny = Effort(rounds=11 if quick else 41, slice=0.01)
    yield _path("update fused", LARGE, large, fused=True)
    yield _path("update foreach", LARGE, large, fused=False)
    yield _path("update tiny", TINY, tiny, fused=True)


def _path(key: str, elements: int, effort: Effort, *, fused: bool) -> Figure:
    contestants = {"ours": updates(Ours(TENSORS, elements))}
    if fused:
        contestants["lazy"] = updates(Ours(TENSORS, elements, lazy=True))
    ratios = compare(updates(Naive(TENSORS, elements, fused=fused)), contestants, effort)
    ours = ratios.pop("ours")
    return Figure(TARGETS[key], ours.median, (ours.low, ours.high), {name: one.median for name, one in ratios.items()})


def _ours(model: nn.Module) -> Contestant:
    """Return what the hook does at AFTER_OPTIMIZER_STEP."""
    hook = EMAHook(decay=DECAY)
    ctx = TrainContext(models={"main": model})
    hook.setup(ctx)
    return calls(lambda: hook.after_optimizer_step(ctx, skipped=False))


def _averaged_model(model: nn.Module) -> Contestant:
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    return calls(lambda: averaged.update_parameters(model))
