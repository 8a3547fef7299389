"""Spike skipping as an update hook: the host knows what is usual, the device is asked whether a step stands out."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from nvalchemi.errors import NoProgressError
from nvalchemi.training.hooks import TrainingUpdateHook, UpdatePriority
from nvalchemi_hooks_spike_skip.kernels import History
from nvalchemi_hooks_spike_skip.report import Skip, SkipReport
from nvalchemi_hooks_spike_skip.settings import checked_choice, checked_count, checked_number

if TYPE_CHECKING:
    from nvalchemi.hooks import TrainContext

__all__ = ["SpikeSkipHook"]

_log = logging.getLogger("nvalchemi.hooks.spike_skip")
_REASONS = {"loss": "the loss stands out", "grad_norm": "the gradient norm stands out"}
_WATCHED = {"both": ("loss", "grad_norm"), "loss": ("loss",), "grad_norm": ("grad_norm",)}
_COUNTERS = ("consecutive_skips", "total_skips", "restarts", "open_batches")


class _Judged(NamedTuple):
    """A number of the step at hand: its value, as soon as the host knows it, and the most it may be."""

    reading: Any
    limit: float


class SpikeSkipHook(TrainingUpdateHook):
    r"""Leave out steps whose loss or gradient norm stands out from the steps before.

    With :math:`y` the logarithms of the last `window` values of executed steps, a value :math:`x` vetoes the step if

    .. math:: \log x > m + \max(k s, \log r), \qquad m = \mathrm{med}(y), \quad s = 1.4826\,\mathrm{med}(|y - m|)

    with :math:`k` the `threshold` and :math:`r` the `min_ratio`: the Hampel identifier, one-sided. A value that is not
    finite vetoes always. What was skipped never enters the statistic.

    Parameters
    ----------
    watch : {"both", "loss", "grad_norm"}
        What is watched: the mean loss of the window's batches, the norm of true gradients before clipping, or both.
    threshold : float
        At least 0: how many standard deviations above the median are too many; 0 leaves it to `min_ratio` alone.
    window : int
        How many executed steps make up the statistic.
    warmup : int, optional
        How many there must be before a finite value is judged; by default half of `window`.
    min_ratio : float
        At least 1: what is less than so many times the median never stands out, however little values vary.
    max_consecutive_skips : int or None
        After so many spikes in a row they are no spikes any more, see `on_limit`. None goes on skipping.
    on_limit : {"restart", "stop"}
        Then forget the statistic, take the next step, and warm up again; or stop the run with an error.
    signed_loss : bool
        The loss may be 0 or below: judge it by itself, not by its logarithm. A loss that turns out to be 0 or below
        otherwise is not judged.

    Attributes
    ----------
    consecutive_skips, total_skips, restarts : int
        Spikes in a row up to now, skipped steps in all, and how often the statistic was forgotten.

    Raises
    ------
    ValueError
        At construction: a setting that makes no sense, with what to give instead.
    NoProgressError
        After the step, with ``on_limit="stop"``: the limit is reached.

    References
    ----------
    F. R. Hampel, "The influence curve and its role in robust estimation", J. Am. Stat. Assoc. 69 (1974) 383-393.

    L. Davies and U. Gather, "The identification of multiple outliers", J. Am. Stat. Assoc. 88 (1993) 782-792.

    P. J. Rousseeuw and C. Croux, "Alternatives to the median absolute deviation", J. Am. Stat. Assoc. 88 (1993)
    1273-1283.

    Examples
    --------
    >>> from nvalchemi.testing import UpdateLoop
    >>> hook = SpikeSkipHook(watch="grad_norm", window=8)
    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> loop = UpdateLoop(hook, optimizers=[torch.optim.SGD([weight], lr=1.0)])
    >>> for gradient in (1.0, 1.2, 0.9, 1.1, 50.0, 1.0):
    ...     _ = loop.batch({weight: gradient})
    >>> loop.steps, hook.skips[0].value
    (5, 50.0)
    """

    name: ClassVar[str] = "spike_skip"
    priority: ClassVar[int] = UpdatePriority.SKIP_SPIKES
    reads_grad = False
    defers_veto = True
    decides_alike = True

    def __init__(
        self,
        *,
        watch: Literal["both", "loss", "grad_norm"] = "both",
        threshold: float = 6.0,
        window: int = 128,
        warmup: int | None = None,
        min_ratio: float = 1.1,
        max_consecutive_skips: int | None = 10,
        on_limit: Literal["restart", "stop"] = "restart",
        signed_loss: bool = False,
    ) -> None:
        self.watch = checked_choice("watch", watch, tuple(_WATCHED))
        self.threshold = checked_number("threshold", threshold, 0.0, "give a number of 0 or above, 6 for example")
        self.window = checked_count("window", window, "give an int of 1 or above, 128 for example")
        if warmup is not None:
            remedy = f"give an int from 1 to the window, which is {window}, or None for half of it"
            warmup = checked_count("warmup", warmup, remedy, most=window)
        self.warmup = max(1, window // 2) if warmup is None else warmup
        self.min_ratio = checked_number("min_ratio", min_ratio, 1.0, "give a number of 1 or above, 1.1 for example")
        if max_consecutive_skips is not None:
            remedy = "give an int of 1 or above, or None to go on skipping for ever"
            checked_count("max_consecutive_skips", max_consecutive_skips, remedy)
        self.max_consecutive_skips = max_consecutive_skips
        self.on_limit = checked_choice("on_limit", on_limit, ("restart", "stop"))
        if not isinstance(signed_loss, bool):
            raise ValueError(f"SpikeSkipHook: signed_loss is {signed_loss!r}; give True or False")
        self.signed_loss = signed_loss
        self.consecutive_skips = self.total_skips = self.restarts = self.open_batches = 0
        self._open_loss: Tensor | float = 0.0  # the sum over the batches of a window that is still open
        self._histories = {
            name: History(window, logarithmic=not (signed_loss and name == "loss")) for name in _WATCHED[watch]
        }
        self._torn = False  # a batch is under way, or was left in its middle
        self._shared: Any = None  # the loss of the window at hand
        self._judged: dict[str, _Judged] = {}
        self._report = SkipReport()
        self._has_warned = False

    @property
    def state_key(self) -> str:
        """The label, or the name with what is watched unless it is both; the other settings are free to change."""
        return self.label or (self.name if self.watch == "both" else f"{self.name}-{self.watch}")

    @property
    def skips(self) -> tuple[Skip, ...]:
        """What held back steps, the latest last; the latest 100 are kept."""
        return self._report.skips

    def summary(self) -> str:
        """Return what was skipped, for a person to read: a line for all, and a line for each of the latest."""
        restarts = f"; the statistic was forgotten {self.restarts} times" if self.restarts else ""
        return f"{self.total_skips} steps skipped{restarts}\n{self._report}".rstrip()

    def before_batch(self, ctx: TrainContext, *, will_skip: bool) -> bool:
        """Forget the losses of a window that an error has ended."""
        if self._torn:
            self.open_batches = 0
        self._torn = True
        return True

    def transform_loss(self, ctx: TrainContext, loss: Tensor) -> Tensor:
        """Return the loss as it is; share the mean over the batches of the window, once it is complete."""
        if "loss" in self._histories and ctx.raw_loss is not None:
            raw = ctx.raw_loss if ctx.raw_loss.dtype == torch.float64 else ctx.raw_loss.float()
            self._open_loss = self._open_loss + raw if self.open_batches else raw
            self.open_batches += 1
            if ctx.window_complete:
                self._shared = ctx.share(self._open_loss / self.open_batches if self.open_batches > 1 else raw)
                self._open_loss, self.open_batches = 0.0, 0
        return loss

    def before_optimizer_step(self, ctx: TrainContext, *, will_skip: bool) -> bool:
        """Have what is watched compared with its limit, on the device."""
        if ctx.window is None:
            raise RuntimeError(
                "SpikeSkipHook.before_optimizer_step needs the update window of an orchestrator, but ctx.window is "
                "None; compose the hook in a TrainingUpdateOrchestrator and call that at every stage of the batch."
            )
        self._judged = {}
        if "loss" in self._histories:
            if self._shared is None:
                raise RuntimeError(
                    "SpikeSkipHook watches the loss, and has seen none in this window: no orchestrator was called at "
                    "TrainingStage.DO_BACKWARD; call it there with ctx.loss set, or use watch='grad_norm'."
                )
            loss, limit, self._shared = self._shared.mean, self._limit("loss"), None
            self._judged["loss"] = _Judged(ctx.read_later(loss), limit)
            above = loss.nan_to_num(math.inf, math.inf, math.inf).sub_(_within(limit, loss)).clamp_(min=0.0)
            ctx.defer_veto_above(above, 0.0, _REASONS["loss"])
        if "grad_norm" in self._histories:
            norm, limit = ctx.grad_norm, self._limit("grad_norm")
            self._judged["grad_norm"] = _Judged(ctx.read_later(norm), limit)
            ctx.defer_veto_above(norm, _within(limit, norm), _REASONS["grad_norm"])
        return True

    def after_optimizer_step(self, ctx: TrainContext, *, skipped: bool) -> None:
        """Note that the batch has come to its end."""
        self._torn = False

    def settled(self, ctx: TrainContext, *, skipped: bool) -> None:
        """Take what was usual into the statistic, and what was not into the report."""
        judged, self._judged = self._judged, {}
        vetoes = ctx.outcome.vetoes if ctx.outcome is not None else ()
        reasons = {veto.reason for veto in vetoes if veto.hook == self.state_key}
        spikes = {name: one for name, one in judged.items() if _REASONS[name] in reasons}
        if spikes:
            self._skipped(ctx, spikes)
        elif not skipped:
            self.consecutive_skips = 0
            for name, one in judged.items():
                self._accept(ctx, name, one.reading.value)

    def state_dict(self) -> dict[str, Any]:
        """Return the statistic, the report, the counters, and the losses of a window that is still open."""
        return {
            "histories": {name: history.values for name, history in self._histories.items()},
            "skips": [list(skip) for skip in self.skips],
            "open_loss": float(self._open_loss),
            **{name: getattr(self, name) for name in _COUNTERS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take all of it over; of a longer window the latest values.

        Raises
        ------
        ValueError
            It is not what `state_dict` returns, of a hook that watches the same; nothing is changed.
        """
        if set(state) != {"histories", "skips", "open_loss", *_COUNTERS} or any(
            type(state[name]) is not int or state[name] < 0 for name in _COUNTERS
        ):
            raise ValueError(
                f"SpikeSkipHook: the state has {sorted(state)}; give what state_dict returns: histories, skips, "
                f"open_loss, and {', '.join(_COUNTERS)}, each an int from 0 on"
            )
        if set(state["histories"]) != set(self._histories):
            raise ValueError(
                f"SpikeSkipHook: the state is that of a hook that watches {sorted(state['histories'])}, and this one "
                f"watches {sorted(self._histories)}; give the same watch"
            )
        for name, history in self._histories.items():
            values = state["histories"][name]
            history.replace(value for value in values if value > 0.0 or not history.logarithmic)
        self._report = SkipReport(state["skips"])
        self._open_loss, self._torn = state["open_loss"], False
        for name in _COUNTERS:
            setattr(self, name, state[name])

    def _limit(self, name: str) -> float:
        history = self._histories[name]
        return history.limit(self.threshold, self.min_ratio) if len(history) >= self.warmup else math.inf

    def _accept(self, ctx: TrainContext, name: str, value: float) -> None:
        history = self._histories[name]
        if value > 0.0 or not history.logarithmic:
            history.append(value)
        elif name == "loss" and not self._has_warned:
            self._has_warned = True
            self._tell(
                ctx,
                f"the loss is {value:.4g} at step {ctx.step_count}, and is judged by its logarithm: it goes unwatched "
                "while it is 0 or below. If that is as it should be, use signed_loss=True.",
            )

    def _skipped(self, ctx: TrainContext, spikes: Mapping[str, _Judged]) -> None:
        self.total_skips += 1
        values = {name: one.reading.value for name, one in spikes.items()}
        for name, one in spikes.items():
            place = ctx.step_count, ctx.epoch, ctx.batch_count
            skip = Skip(*place, name, values[name], one.limit, self._histories[name].median)
            self._report.add(skip)
            self._tell(ctx, f"skipped {skip}.")
        if any(map(math.isfinite, values.values())):  # what is not finite is never taken, in however long a row
            self.consecutive_skips += 1
            if self.max_consecutive_skips is not None and self.consecutive_skips >= self.max_consecutive_skips:
                self._end_of_row(ctx)

    def _end_of_row(self, ctx: TrainContext) -> None:
        row = (
            f"{self.consecutive_skips} spikes in a row (max_consecutive_skips={self.max_consecutive_skips}), the "
            f"latest at {self.skips[-1]}"
        )
        if self.on_limit == "stop":
            raise NoProgressError(
                f"SpikeSkipHook: {row}. Look at the data and the weights: go on from an earlier checkpoint, lower the "
                "learning rate, or use on_limit='restart' if this is a new normal."
            )
        for history in self._histories.values():
            history.replace(())
        self.consecutive_skips = 0
        self.restarts += 1
        self._tell(ctx, f"{row}: taken for a new normal, the next {self.warmup} steps are taken and make it up.")

    def _tell(self, ctx: TrainContext, message: str) -> None:
        if ctx.global_rank == 0:
            _log.warning("SpikeSkipHook: %s", message)

    def __repr__(self) -> str:
        fields = ("watch", "threshold", "window", "warmup", "min_ratio", "max_consecutive_skips", "on_limit")
        return f"{type(self).__name__}({', '.join(f'{field}={getattr(self, field)!r}' for field in fields)})"


def _within(limit: float, value: Tensor) -> float:
    """Return a limit as the value's dtype can hold it."""
    return min(limit, torch.finfo(value.dtype).max)
