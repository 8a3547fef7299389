"""The averaged model at work: it follows a live model, with accumulators where the weights are of low precision."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from nvalchemi.training import like_sharded, local_part
from nvalchemi_hooks_ema.offers import Offered, taken_names
from nvalchemi_hooks_ema.pairing import Pair, named_tensors, pair_up, prefix_between
from nvalchemi_hooks_ema.plan import Plan
from nvalchemi_hooks_ema.sharding import is_fully_sharded, put_back, refuse_other_layout
from nvalchemi_hooks_ema.state import plain_copy, refuse_other_weights, renamed

if TYPE_CHECKING:
    from nvalchemi.hooks import TrainContext

__all__ = ["Shadow"]

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_INNER = "module."  # where an AveragedModel keeps the copy
_NOTHING: frozenset[str] = frozenset()
_version = attrgetter("_version")
_OF_THIS_PROCESS = ("_plan", "_counted", "_written", "_offered")


class Shadow:
    """An `AveragedModel` that follows a live model without a host read.

    Parameters
    ----------
    averaged : torch.optim.swa_utils.AveragedModel
        The copy. When it is matched, it is put into eval mode and needs no gradients any more.
    decay : float
        The weight of the average so far.
    use_buffers : bool
        Whether floating buffers are averaged; otherwise they are copied.

    Attributes
    ----------
    averaged : torch.optim.swa_utils.AveragedModel
        The averaged model, up to date after every `update`.
    accumulators : dict of str to torch.Tensor
        float32 averages of the tensors in bfloat16 and float16, by name; the averaged model holds them rounded.
    """

    _plan: Plan | None
    _counted: tuple[Tensor, int] | None  # n_averaged, and its version when it was known to be above 0
    _written: list[int]  # the versions of the rounded tensors when they matched their accumulators
    _is_sharded = False
    _offered: list[Offered]  # what may have been averaged along with the step

    def __init__(self, averaged: AveragedModel, *, decay: float, use_buffers: bool) -> None:
        self.averaged = averaged
        self.accumulators: dict[str, Tensor] = {}
        self._weight = 1 - decay
        self._use_buffers = use_buffers
        self._forget()

    def match(self, source: nn.Module) -> None:
        """Bring device and dtype of every tensor in line with the live model, and prepare the updates.

        Parameters
        ----------
        source : torch.nn.Module
            The live model without its wrappers.

        Raises
        ------
        ValueError
            The two models do not belong together; the first parameter that does not match is named.
        """
        self._accept_writes()
        self._drop_wrapper(source)
        put_back(self.averaged)
        put_back(source)
        pairs = pair_up(self.averaged.module, source, use_buffers=self._use_buffers)
        self.averaged.eval().requires_grad_(False)
        for pair in pairs:
            self._align(pair)
        self._plan = Plan(source, self.averaged.module, pairs, self.accumulators, self._weight)
        self._is_sharded = is_fully_sharded(self.averaged)
        self._note_writes()

    @property
    def is_fresh(self) -> bool:
        """Whether nothing was averaged yet, so that the next update copies."""
        counter = self.averaged.n_averaged
        if self._counted is not None and self._counted[0] is counter and self._counted[1] == counter._version:
            return False
        return int(counter) == 0  # read only where somebody else may have written it

    def offer(self, source: nn.Module, ctx: TrainContext) -> None:
        """Let the coming step average along what it can; `update` sees to the rest.

        Parameters
        ----------
        source : torch.nn.Module
            The live model without its wrappers.
        ctx : nvalchemi.hooks.TrainContext
            At ``before_optimizer_step``.
        """
        if self.is_fresh:  # a copy, which nobody else makes
            return
        plan = self._fitting_plan(source)
        self._accept_writes()
        self._offered = plan.offers.make(ctx)

    def withdraw(self) -> None:
        """Forget what was offered for a step that did not come."""
        self._offered = []

    @torch.no_grad()
    def update(self, source: nn.Module, veto: Tensor | None = None) -> None:
        """Follow the live model: the first time by a copy, then by ``decay * old + (1 - decay) * new``.

        Parameters
        ----------
        source : torch.nn.Module
            The live model without its wrappers.
        veto : torch.Tensor, optional
            0-dim float32, exactly 0 or 1, on any device. With 1 nothing is averaged; whether to `count` is said later.
            There is none for a copy: an average that `is_fresh` has to know whether the step was executed.
        """
        taken = self._take_offered()
        if self._is_sharded:  # a copy of the user's own may have stayed gathered when it was called
            put_back(self.averaged)
        plan = self._fitting_plan(source)
        self._accept_writes()
        for call in plan.copying if self.is_fresh else plan.blending(taken):
            call(veto)
        if veto is None:
            self.count()
        self._note_writes()

    def count(self) -> None:
        """Count an update."""
        counter = self.averaged.n_averaged
        counter.add_(1)
        self._counted = counter, counter._version

    def state(self) -> dict[str, Any]:
        """Return the averaged model's state and, where there are any, the accumulators; nothing in it is shared."""
        self._accept_writes()
        state: dict[str, Any] = {"averaged_model_state": plain_copy(self.averaged.state_dict())}
        if self.accumulators:
            state["accumulators"] = plain_copy(self.accumulators)
        return state

    def load(self, averaged_model_state: Mapping[str, Any], accumulators: Mapping[str, Tensor]) -> None:
        """Take over a state, in place.

        Parameters
        ----------
        averaged_model_state : mapping of str to Any
            The state of the averaged model. Its names may have one prefix more or less, that of a wrapper.
        accumulators : mapping of str to torch.Tensor
            Those that the state holds; where one is missing it starts from the averaged weight.

        Raises
        ------
        ValueError
            Names or shapes differ; nothing has changed.
        """
        needed = self.averaged.state_dict()
        known = {**{_INNER + name: value for name, value in self.accumulators.items()}, **needed}
        precise = {**averaged_model_state, **{_INNER + name: value for name, value in accumulators.items()}}
        state = renamed(precise, known, below=_INNER)
        refuse_other_weights(state, needed, known)
        self.averaged.load_state_dict({name: like_sharded(state[name], needed[name]) for name in needed})
        for name, accumulator in self.accumulators.items():
            accumulator.copy_(like_sharded(state.get(_INNER + name, accumulator), accumulator))
        self._note_writes()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: lists of tensors, and versions."""
        self._accept_writes()
        return {name: value for name, value in vars(self).items() if name not in _OF_THIS_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def _forget(self) -> None:
        self._plan, self._counted, self._written, self._offered = None, None, [], []

    def _fitting_plan(self, source: nn.Module) -> Plan:
        if self._plan is None or not self._plan.fits(source, self.averaged.module):
            self.match(source)
        assert self._plan is not None
        return self._plan

    def _take_offered(self) -> frozenset[str]:
        """Return the names of what is averaged already; that the step wrote those averages is as it should be."""
        if not self._offered:
            return _NOTHING
        taken, self._offered = taken_names(self._offered), []
        if self._plan is not None:
            rounded = zip(self._plan.rounded, self._versions(), self._written, strict=True)
            self._written = [new if name in taken else old for (name, _, _), new, old in rounded]
        return taken

    def _accept_writes(self) -> None:
        """Where somebody else wrote averaged weights that are rounded, the accumulators go on from there."""
        if self._written != (versions := self._versions()):
            assert self._plan is not None
            for (_, accumulator, average), written, version in zip(
                self._plan.rounded, self._written, versions, strict=True
            ):
                if written != version:
                    accumulator.copy_(average)

    def _note_writes(self) -> None:
        self._written = self._versions()

    def _versions(self) -> list[int]:
        return list(map(_version, self._plan.rounded_averages)) if self._plan is not None else []

    def _drop_wrapper(self, source: nn.Module) -> None:
        """Where the copy was made of a wrapper and the live model is bare now, keep the bare part, and its names."""
        prefix = prefix_between(named_tensors(self.averaged.module), named_tensors(source))
        if prefix is not None:
            self.averaged.module = self.averaged.module.get_submodule(prefix.removesuffix("."))
            self.accumulators = {name.removeprefix(prefix): value for name, value in self.accumulators.items()}

    def _align(self, pair: Pair) -> None:
        average, live = pair.average, pair.live
        refuse_other_layout(pair.name, average, live)
        precise = self.accumulators.pop(pair.name, average.detach())
        if pair.blended and live.dtype in _LOW_PRECISION:
            self.accumulators[pair.name] = precise.to(live.device, torch.float32)
        misplaced = (average.device, average.dtype) != (live.device, live.dtype)
        if misplaced or _cannot_be_written(average, live):
            average.data = precise.to(live.device, live.dtype, copy=True)


def _cannot_be_written(average: Tensor, live: Tensor) -> bool:
    """Whether writing the average would write the live tensor, or one element through another (an expanded tensor)."""
    shared = local_part(average).data_ptr() == local_part(live).data_ptr() != 0
    return shared or any(step == 0 and size > 1 for step, size in zip(average.stride(), average.shape, strict=True))
