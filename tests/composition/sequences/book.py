"""What must hold, in plain Python: one number at a time, one batch after the other, nothing folded and nothing lazy."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

from nvalchemi.training import TrainingStage

from .runs import (
    ACCUMULATED,
    CLIP_VALUE,
    GAMMA,
    GROWTH_INTERVAL,
    INIT_SCALE,
    LEARNING_RATES,
    MAX_NORM,
    MAX_SCALE,
    MIN_SCALE,
    WEIGHT_DECAY,
    Seen,
)
from .settings import Settings, Step

Numbers = list[float]

_TOLERANCE = {"float32": 2e-5, "float64": 1e-7, "bfloat16": 3e-2}  # what divides gradients is a float32 everywhere
_BEFORE_BUFFERS = {("plain", TrainingStage.BEFORE_BATCH), ("plain", TrainingStage.BEFORE_FORWARD), ("code", "forward")}
_INSIDE_BACKWARD = ("update", "transform_loss")
_BEFORE_BACKWARD = {
    ("plain", TrainingStage.AFTER_FORWARD),
    ("plain", TrainingStage.BEFORE_LOSS),
    ("plain", TrainingStage.AFTER_LOSS),
    ("plain", TrainingStage.BEFORE_BACKWARD),
    ("code", "loss"),
    _INSIDE_BACKWARD,
}
_BEFORE_STEP = {("plain", TrainingStage.AFTER_BACKWARD), ("plain", TrainingStage.BEFORE_OPTIMIZER_STEP)}
_FRESH = {
    "accum": {"batches": 0},
    "ema": {"updates": 0},
    "clip": {"clipped": 0, "measured": 0},
    "veto": {"in a row": 0, "in all": 0},
    "scaling": {"scale": INIT_SCALE, "good": 0},
}


class Expected:
    """What one batch comes to.

    Attributes
    ----------
    raises : str
        The class of what is raised; empty if nothing is.
    gradients : dict or None
        What a hook that reads them finds; None where it is not asked, or finds an inf.
    """

    def __init__(self) -> None:
        self.raises = ""
        self.loss: float | None = None
        self.loss_size = 0.0
        self.reached_forward = self.ended = False
        self.gradients: dict[str, Numbers | None] | None = None
        self.outcome: dict[str, Any] | None = None
        self.skipped = False
        self.step_count = 0


class Book:
    """The run as it should be.

    Attributes
    ----------
    seen : dict
        Every tensor as it was seen last; what moves is expected to come near, all else stays as it is.
    hooks : dict
        The counters of every hook that the run ever had, those included that it has lost.
    kept : dict
        Gradients of a window that goes on.
    """

    def __init__(self, settings: Settings, seen: Seen) -> None:
        self.settings = settings
        self.seen = copy.deepcopy(seen)
        self.near: set[str] = set()  # the parts of `seen` that came from arithmetic since
        self.hooks = {name: dict(_FRESH[name]) for name in settings.hooks}
        self.lost_average: Seen | None = None  # of a run that has been given up, with the hook
        self.moves = [0] * len(settings.owners)
        self.kept: dict[str, Numbers | None] = {"w": None, "b": None}
        self.open = False
        self.torn = False
        self.torn_window = False
        self.half_added = False  # a backward pass has begun, and no step stage has followed
        self.outcome: dict[str, Any] | None = None
        self.step_count = self.batch_count = self.epoch_step_count = self.epoch = 0
        self.goal: int | None = None
        self.in_pass = self.ended = self.pending = False
        self.steps_before = 0

    # A batch, stage by stage.

    def train(self, step: Step, *, is_last: bool = False) -> Expected:
        """Take one batch; return what must be seen of it."""
        if self.pending:
            self.pending = self.in_pass = False
        self.torn = True
        expected = Expected()
        counted = self.hooks.get("accum")
        if counted is not None:
            if self.torn_window:  # a batch of it was left in its middle
                counted["batches"], self.open = 0, False
                self.kept = {"w": None, "b": None}
            self.torn_window = True
            step = dataclasses.replace(step, open=counted["batches"] + 1 < ACCUMULATED and not is_last)
        expected.raises = self._until_step(step, expected) or self._step(step, expected) or ""
        if not expected.raises:
            expected.raises = "Boom" if step.fault == ("plain", TrainingStage.AFTER_BATCH) else ""
            expected.ended = not expected.raises
        expected.skipped = self.outcome is not None and self.outcome["skipped"]
        expected.step_count = self.step_count
        return expected

    def _until_step(self, step: Step, expected: Expected) -> str:
        if step.fault == ("update", "before_batch"):
            return "Boom"
        if not self.open or self.half_added:
            self.kept = {"w": None, "b": None}
        expected.reached_forward = step.fault not in {
            ("plain", TrainingStage.BEFORE_BATCH), ("plain", TrainingStage.BEFORE_FORWARD)
        }  # fmt: skip
        if step.fault in _BEFORE_BUFFERS:
            return "Boom"
        self.near.add("buffers")
        buffers = self.seen["buffers"]
        buffers["seen"] = [buffers["seen"][0] + 1]
        buffers["level"] = [0.5 * buffers["level"][0] + 0.5 * step.w[0]]
        live = self.seen["live"]
        terms = [
            weight * x for name in ("w", "b") for weight, x in zip(live[name], step.gradients[name] or [], strict=False)
        ]
        expected.loss, expected.loss_size = _sum(terms), 1.0 + sum(abs(term) for term in terms)
        self.half_added |= step.fault == _INSIDE_BACKWARD
        if step.fault in _BEFORE_BACKWARD:
            return "Boom"
        self.half_added = True
        for name, gradient in step.gradients.items():
            before = self.kept[name]
            if gradient is not None:
                self.kept[name] = gradient if before is None else [a + g for a, g in zip(before, gradient, strict=True)]
        return "Boom" if step.fault in _BEFORE_STEP else ""

    def _step(self, step: Step, expected: Expected) -> str:
        self.half_added = False
        if step.open:
            self.open, self.outcome = True, {"skipped": True, "open": True, "vetoes": set(), "found_inf": False}
            raises = "Boom" if step.fault == ("update", "after_optimizer_step") else ""
            self._accumulated(1)
            self._count(False)
            return raises or self._fault_after_step(step)
        self.open = False
        self.outcome = {"skipped": True, "open": False, "vetoes": set(), "found_inf": False}
        if step.fault == ("update", "before_optimizer_step"):
            return "Boom"
        if "accum" in self.hooks:
            count = self.hooks["accum"]["batches"] + 1
            self.kept = {name: g and [x / count for x in g] for name, g in self.kept.items()}
        effective = self._agree(step, expected)
        if not self.outcome["skipped"]:
            for place in self.outcome["moved"]:
                for name in self.settings.owners[place]:
                    if effective[name] is not None:
                        self._advance(
                            name, effective[name], GAMMA ** self.moves[place] * LEARNING_RATES[self.settings.optimizer]
                        )
                self.moves[place] += 1
        raises = self._after_step(step)
        self._count(not self.outcome["skipped"])
        return raises or self._fault_after_step(step)

    def _fault_after_step(self, step: Step) -> str:
        return "Boom" if step.fault == ("plain", TrainingStage.AFTER_OPTIMIZER_STEP) else ""

    def _count(self, stepped: bool) -> None:
        self.step_count += stepped
        self.batch_count += 1
        self.epoch_step_count += 1
        self.torn = False

    def _agree(self, step: Step, expected: Expected) -> dict[str, Numbers | None]:
        """Decide who steps, move the scale, and return the gradients that optimizers use."""
        settings, hooks, outcome = self.settings, self.settings.hooks, self.outcome
        assert outcome is not None
        owners = settings.owners
        there = {place for place, names in enumerate(owners) if any(self.kept[name] is not None for name in names)}
        finite = {p for p in there if all(map(math.isfinite, _flat(self.kept, owners[p])))}
        any_inf = bool(there - finite)
        vetoes = outcome["vetoes"]
        if step.veto not in ("", "deferred no"):
            vetoes.add("probe")
        if any_inf:
            vetoes |= {name for name in ("accum", "veto", "clip") if name in hooks}
        outcome["found_inf"] = (step.veto == "deferred inf" and settings.probe_defers) or (any_inf and settings.guarded)
        moved = set() if vetoes else finite if settings.scales else there
        outcome["moved"] = sorted(moved)
        outcome["skipped"] = not moved
        if settings.scales and settings.scaling != "static":
            self._close_scale(outcome["found_inf"], bool(moved))
        return self._clip(expected, any_inf)

    def _close_scale(self, found_inf: bool, moved: bool) -> None:
        scaling = self.hooks["scaling"]
        if found_inf:
            scaling["scale"], scaling["good"] = max(MIN_SCALE, scaling["scale"] / 2), 0
        elif moved:
            scaling["good"] += 1
            if scaling["good"] == GROWTH_INTERVAL:
                scaling["scale"], scaling["good"] = min(MAX_SCALE, scaling["scale"] * 2), 0

    def _clip(self, expected: Expected, any_inf: bool) -> dict[str, Numbers | None]:
        """Return clipped gradients; note what a reader sees, and whether clipping changed anything."""
        settings, own = self.settings, dict(self.kept)
        assert self.outcome is not None
        self.outcome["clipped"] = False
        reads = settings.probe_reads and not any_inf
        if reads and settings.probe_priority < 30:
            expected.gradients = dict(own)
        if "clip" in settings.hooks and not any_inf:
            limit = MAX_NORM[settings.clip]
            everybody = [name for names in settings.owners for name in names]
            groups = settings.owners if settings.clip == "per_optimizer" else [everybody]
            for names in groups:
                norm = math.sqrt(sum(g * g for g in _flat(self.kept, names)))
                self.outcome["clipped"] |= norm > limit
                for name in names:
                    if own[name] is not None:
                        own[name] = [g / max(1.0, (norm + 1e-6) / limit) for g in own[name]]
            if settings.clip == "value":
                self.outcome["clipped"] |= any(abs(g) > CLIP_VALUE for g in _flat(own, everybody))
                own = {n: g and [min(max(x, -CLIP_VALUE), CLIP_VALUE) for x in g] for n, g in own.items()}
        if reads and settings.probe_priority > 30:
            expected.gradients = dict(own)
        return own

    def _advance(self, name: str, gradient: Numbers, rate: float) -> None:
        """Step one parameter by the book."""
        kind, weights, moments = self.settings.optimizer, self.seen["live"][name], self.seen["moments"][name]
        self.near.add(name)
        if kind == "sgd":
            self.seen["live"][name] = [w - rate * g for w, g in zip(weights, gradient, strict=True)]
        elif kind == "momentum":
            old = moments.get("buffer")
            new = gradient if old is None else [0.9 * b + g for b, g in zip(old, gradient, strict=True)]
            moments["buffer"] = new
            self.seen["live"][name] = [w - rate * b for w, b in zip(weights, new, strict=True)]
        else:
            decayed = [w * (1 - rate * WEIGHT_DECAY) for w in weights] if kind == "adamw" else weights
            count = moments["step"][0] + 1
            first = [0.9 * m + 0.1 * g for m, g in zip(moments["exp_avg"], gradient, strict=True)]
            second = [0.999 * v + 0.001 * g * g for v, g in zip(moments["exp_avg_sq"], gradient, strict=True)]
            moments.update(step=[count], exp_avg=first, exp_avg_sq=second)
            scale = math.sqrt(1 - 0.999**count)
            self.seen["live"][name] = [
                w - rate / (1 - 0.9**count) * m / (math.sqrt(v) / scale + 1e-8)
                for w, m, v in zip(decayed, first, second, strict=True)
            ]

    def _accumulated(self, batches: int) -> None:
        self.torn_window = False
        if "accum" in self.hooks:
            self.hooks["accum"]["batches"] = batches and self.hooks["accum"]["batches"] + batches

    def _after_step(self, step: Step) -> str:
        """Have hooks react and count, in their order; return what is raised."""
        self._accumulated(0)
        late = self.settings.probe_priority > 50
        fault = step.fault == ("update", "after_optimizer_step")
        assert self.outcome is not None
        if "ema" in self.settings.hooks and not self.outcome["skipped"] and (late or not fault):
            self._average()
        return self._settle(step) or ("Boom" if fault else "")

    def _average(self) -> None:
        (decay, every, start), done = self.settings.ema, self.step_count + 1
        if done < start or done % every:
            return
        live = {**self.seen["live"], **self.seen["buffers"]}
        average, fresh = self.seen["average"], self.hooks["ema"]["updates"] == 0
        self.near.add("average")
        for name, new in live.items():
            if fresh or name == "seen":
                average[name] = list(new)
            else:
                average[name] = [decay * a + (1 - decay) * n for a, n in zip(average[name], new, strict=True)]
        self.hooks["ema"]["updates"] += 1

    def _settle(self, step: Step) -> str:
        fault = step.fault == ("update", "settled") and not self.settings.lazy
        priority, hooks, outcome = self.settings.probe_priority, self.settings.hooks, self.outcome
        assert outcome is not None
        if fault and priority < 25:
            return "Boom"
        if "veto" in hooks:
            veto, limit = self.hooks["veto"], self.settings.limit
            veto["in a row"] = veto["in a row"] + 1 if outcome["found_inf"] else 0
            veto["in all"] += outcome["found_inf"]
            if outcome["found_inf"] and limit is not None and veto["in a row"] >= limit:
                return "NonFiniteGradientError"
        if "clip" in hooks:
            self.hooks["clip"]["measured"] += 1
            self.hooks["clip"]["clipped"] += outcome["clipped"] and not outcome["skipped"]
        return "Boom" if fault else ""

    # A pass.

    def run(self, steps: Sequence[Step], save_at: Collection[TrainingStage]) -> tuple[str, list[Expected], list[Book]]:
        """Take a pass; return what is raised, what is seen of each batch, and the books of what hooks have saved."""
        saved: list[Book] = []
        batches: list[Expected] = []

        def keep(stage: TrainingStage) -> None:
            if stage in save_at:
                saved.append(self.copied())

        def end(raises: str) -> tuple[str, list[Expected], list[Book]]:
            return raises, batches, saved

        self.goal = self.epoch + 1 if self.goal is None else self.goal
        keep(TrainingStage.BEFORE_TRAINING)
        resumes = self.pending and self.in_pass
        if not resumes:
            self.in_pass = self.ended = False
        self.pending = False
        while resumes or self.epoch < self.goal:
            if not self.ended:
                todo = steps[self.epoch_step_count :] if resumes else steps
                if not resumes:
                    self.epoch_step_count = 0
                    keep(TrainingStage.BEFORE_EPOCH)
                    self.in_pass, self.ended, self.steps_before = True, False, self.step_count
                for place, step in enumerate(todo):
                    batches.append(self.train(step, is_last=place == len(todo) - 1))
                    if batches[-1].raises:
                        return end(batches[-1].raises)
                    if step.save is not None:
                        saved.append(self.copied())
                if self.step_count == self.steps_before:
                    return end("NoProgressError")
                self.ended = True
                keep(TrainingStage.AFTER_EPOCH)
            resumes = False
            self.epoch += 1
            self.in_pass = self.ended = False
        keep(TrainingStage.AFTER_TRAINING)
        self.goal = None
        return end("")

    # States.

    def copied(self) -> Book:
        """Return the book as it is now."""
        return copy.deepcopy(self)

    def reopened(self, settings: Settings, fresh: Collection[str], average: Seen | None) -> Book:
        """Return the book of a run of other settings that goes on from here.

        Hooks in `fresh` start from scratch, `average` is that of a fresh one; what a run has lost is kept for later.
        """
        book = self.copied()
        book.settings, book.pending, book.torn, book.outcome = settings, True, False, None
        book.half_added = False
        for name in fresh:
            book.hooks[name] = dict(_FRESH[name])
        book.lost_average = average if "ema" in fresh else self.seen["average"] or self.lost_average
        book.seen["average"] = copy.deepcopy(book.lost_average) if "ema" in settings.hooks else None
        return book

    # What is seen.

    def adopt(self, seen: Seen) -> None:
        """Go on from what is seen, so that rounding does not add up."""
        self.seen, self.near = copy.deepcopy(seen), set()

    def check(self, seen: Seen) -> None:
        """Compare every tensor: what moved is near, and all else is the same bit for bit."""
        for name in ("w", "b"):
            for part in ("live", "moments"):
                self._same_or_near(part, name, seen[part][name], name in self.near)
        for name in self.seen["buffers"]:
            self._same_or_near("buffers", name, seen["buffers"][name], "buffers" in self.near and name == "level")
        if self.seen["average"] is not None:
            for name, numbers in seen["average"].items():
                self._same_or_near("average", name, numbers, "average" in self.near)

    def _same_or_near(self, part: str, name: str, found: Any, near: bool) -> None:
        wanted = self.seen[part][name]
        what = f"{part} {name} is {found} and should be {'near' if near else 'exactly'} {wanted}"
        if not near:
            assert repr(found) == repr(wanted), what
            return
        pairs = [(found, wanted)] if isinstance(wanted, list) else [(found[key], wanted[key]) for key in wanted]
        for have, want in pairs:
            assert all(map(self.close, have, want)), what

    def close(self, found: float, wanted: float, size: float = 1.0) -> bool:
        """Return whether a number is what it should be, up to rounding."""
        return _same(found, wanted) or abs(found - wanted) <= _TOLERANCE[self.settings.dtype] * (size + abs(wanted))

    def counted(self) -> dict[str, Any]:
        """Return everything that is counted."""
        settings = self.settings
        rates = [LEARNING_RATES[settings.optimizer] * GAMMA**moves for moves in self.moves]
        counted = {
            "step_count": self.step_count,
            "global_step_count": self.step_count,
            "batch_count": self.batch_count,
            "epoch_step_count": self.epoch_step_count,
            "epoch": self.epoch,
            "schedulers": list(self.moves),
            "rates": rates,
        }
        for name in settings.hooks:
            counted[name] = dict(self.hooks[name])
        if "ema" in settings.hooks:
            counted["ema"]["averaged"] = self.hooks["ema"]["updates"]
        if "scaling" in settings.hooks and not settings.scales:
            counted["scaling"] = {}
        return counted


def _flat(gradients: dict[str, Numbers | None], names: Collection[str]) -> Numbers:
    return [g for name in names for g in gradients[name] or []]


def _sum(terms: Numbers) -> float:
    total = 0.0
    for term in terms:
        total += term
    return total


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))
