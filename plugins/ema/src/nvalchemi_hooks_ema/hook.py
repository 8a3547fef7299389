"""When a model's average is updated: configuration, stages and state of `EMAHook`."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr
from torch import nn
from torch.optim.swa_utils import AveragedModel

from nvalchemi.training import bare_module
from nvalchemi.training.hooks import TrainingUpdateHook
from nvalchemi_hooks_ema.building import averaged_copy, finished
from nvalchemi_hooks_ema.offers import wants_offers
from nvalchemi_hooks_ema.shadow import Shadow
from nvalchemi_hooks_ema.state import plain_copy, refuse_other_settings, update_count

if TYPE_CHECKING:
    from nvalchemi.hooks import TrainContext

__all__ = ["EMAHook"]


def _read_quickly(private: str) -> property:
    """Return a property that reads a private attribute, for what is read every step: pydantic's own way takes 5 us."""

    def read(hook: EMAHook) -> Any:
        return hook.__pydantic_private__[private]  # type: ignore[index]  # it is there once the hook is made

    return property(read)


class EMAHook(TrainingUpdateHook, BaseModel):
    r"""Keep an exponential moving average of a model's weights.

    After every executed optimizer step the averaged weights :math:`e` follow the live ones :math:`w`,

    .. math:: e_t = d \, e_{t-1} + (1 - d) \, w_t ,

    beginning with a copy, :math:`e_1 = w_1`. It only observes: the live model, its gradients and its optimizers stay as
    they are, and a step that was skipped leaves the average as it is, bit for bit.

    Parameters
    ----------
    model_key : str
        Which of ``ctx.models`` is averaged; not empty.
    decay : float
        :math:`d`, from 0 to below 1; the average remembers some ``1 / (1 - decay)`` updates.
    update_every : int
        Update at every `update_every`-th step, counted from the beginning of training; at least 1.
    start_step : int
        The first step after which there may be an update, counted from 1; at least 0.
    use_buffers : bool
        Average floating buffers too; if False they are copied. Integer and boolean buffers, and the unit vectors of
        spectral norm, are always copied.
    num_updates : int
        Updates so far; at least 0. It counts on from there.

    Raises
    ------
    pydantic.ValidationError
        A value is out of bounds, or a keyword is unknown; the field is named.

    Notes
    -----
    The average is built at SETUP, else at the first step that counts, from the model without its wrappers
    (``DistributedDataParallel``, ``torch.compile``), and lives on the model's devices in the model's dtypes. Weights in
    bfloat16 or float16 are averaged in float32 accumulators, of which the averaged model holds the rounded values.

    Where the host does not know yet whether a step was taken (a lazy orchestrator), the average follows under the veto
    on the device; `num_updates` and ``n_averaged`` count when the step is settled, and `state_dict` waits for that.

    A run that ends, having taken steps of which none was averaged, gives a ``UserWarning``.

    To resume, load the state of the old hook into a new one of equal configuration, before training goes on::

        torch.save({"model": model.state_dict(), "ema": hook.state_dict()}, path)
        ...
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        hook = EMAHook(decay=0.99)
        hook.load_state_dict(saved["ema"])

    References
    ----------
    Polyak and Juditsky, "Acceleration of stochastic approximation by averaging", SIAM J. Control Optim. 30 (1992).
    Morales-Brotons, Vogels and Hendrikx, "Exponential moving average of weights in deep learning: dynamics and
    benefits", Transactions on Machine Learning Research (2024).

    Examples
    --------
    >>> import torch
    >>> from nvalchemi.hooks import TrainContext
    >>> from nvalchemi.training import TrainingStage
    >>> from nvalchemi.training.hooks import TrainingUpdateOrchestrator
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> hook = EMAHook(decay=0.5)
    >>> update = TrainingUpdateOrchestrator(hook)
    >>> for step, weight in enumerate([1.0, 3.0]):
    ...     _ = torch.nn.init.constant_(model.weight, weight)  # stands for an optimizer's step
    ...     update(TrainContext(models={"main": model}, step_count=step), TrainingStage.AFTER_OPTIMIZER_STEP)
    >>> hook.get_averaged_model().module.weight.item(), hook.num_updates
    (2.0, 2)

    The same in a hook that goes on elsewhere:

    >>> resumed = EMAHook(decay=0.5)
    >>> resumed.load_state_dict(hook.state_dict())
    >>> TrainingUpdateOrchestrator(resumed)(
    ...     TrainContext(models={"main": model}, step_count=2), TrainingStage.AFTER_OPTIMIZER_STEP)
    >>> resumed.get_averaged_model().module.weight.item(), resumed.num_updates
    (2.5, 3)
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")
    # Annotated, for pydantic would take them for fields otherwise.
    may_veto: ClassVar[bool] = False  # type: ignore[misc]  # what follows, too
    reads_grad: ClassVar[bool] = False  # type: ignore[misc]
    defers_veto: ClassVar[bool] = True  # type: ignore[misc]

    model_key: str = Field(default="main", min_length=1, frozen=True)
    decay: float = Field(default=0.999, ge=0.0, lt=1.0, frozen=True)
    update_every: int = Field(default=1, ge=1, frozen=True)
    start_step: int = Field(default=0, ge=0, frozen=True)
    use_buffers: bool = Field(default=True, frozen=True)
    num_updates: int = Field(default=0, ge=0)

    _shadow: Shadow | None = PrivateAttr(default=None)
    _pending: dict[str, Any] = PrivateAttr(default_factory=dict)  # a state that waits for the shadow
    _unsettled: TrainContext | None = PrivateAttr(default=None)  # the step of an update that may have been vetoed
    _without_update: int = PrivateAttr(default=0)  # executed steps before the first update
    _shadow_at_work = _read_quickly("_shadow")
    _is_unsettled_by = _read_quickly("_unsettled")

    # Two hooks of equal configuration are two hooks; comparing field by field would compare tensors.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def state_key(self) -> str:
        """The label, else the name with every setting that is not the default, ``ema[decay=0.99]`` for example."""
        if self.label is not None:
            return self.label
        fields = type(self).model_fields
        own = [f"{name}={value}" for name, value in self._settings().items() if value != fields[name].default]
        return f"{self.name}[{','.join(own)}]" if own else self.name

    def setup(self, ctx: TrainContext) -> None:
        """Build the average, or fit one that was restored to the model as it is now."""
        self._fitted_shadow(self._source(ctx))

    def before_optimizer_step(self, ctx: TrainContext, *, will_skip: bool) -> bool:
        """Veto nothing; offer the average to whoever carries out the step, if there is somebody who would take it."""
        shadow = self._shadow_at_work
        if shadow is not None:
            shadow.withdraw()
            if not will_skip and wants_offers(ctx) and self._counts(ctx):
                shadow.offer(self._source(ctx), ctx)
        return True

    def after_optimizer_step(self, ctx: TrainContext, *, skipped: bool) -> None:
        """Update the average if the step was executed and is one that counts.

        Where a veto is still on the device the update is done under it, without waiting; the first copy cannot.
        """
        if skipped or not self._counts(ctx):
            return
        source = self._source(ctx)
        shadow = self._shadow_at_work or self._fitted_shadow(source)
        if ctx.pending is not None and shadow.is_fresh and ctx.step_skipped:  # asking decides
            return
        shadow.update(source, ctx.veto_flag if ctx.window is not None else None)
        if ctx.pending is None:
            self._count(shadow)
        else:
            self._leave_to_settled(ctx)

    def settled(self, ctx: TrainContext, *, skipped: bool) -> None:
        """Count an update that was done under a veto, now that the host knows whether it was one."""
        if self._is_unsettled_by is not None:
            self._leave_to_settled(None)
            shadow = self._shadow_at_work
            if shadow is not None and not skipped:
                self._count(shadow)
        if not (skipped or self.num_updates):
            self._without_update += 1

    def close(self) -> None:
        """Warn where a run has taken steps and none was averaged: the average is the model as it was at first."""
        steps, self._without_update = self._without_update, 0
        if steps and not self.num_updates:
            warnings.warn(
                f"EMAHook has seen {steps} executed steps of {self.model_key!r} and averaged none of them, because "
                f"start_step={self.start_step} and update_every={self.update_every}: its averaged model is the model "
                "as it was at first. Lower them, or train for longer.",
                stacklevel=2,
            )

    def capture_key(self, ctx: TrainContext) -> Hashable | None:
        """Return whether this step counts, and what is called then; None for the first copy, which is not captured."""
        if not self._counts(ctx):
            return (False,)
        shadow, source = self._shadow, self._source(ctx)
        return None if shadow is None or shadow.is_fresh else (True, shadow.ready(source))

    def captured(self, ctx: TrainContext) -> None:
        """Nothing is left that a replay would need."""

    def replayed(self, ctx: TrainContext, left: None) -> None:
        """Have `settled` count the update, if the step is one that counts."""
        if self._counts(ctx):
            self._leave_to_settled(ctx)

    def get_averaged_model(self) -> AveragedModel:
        """Return the averaged model: in eval mode, without gradients, up to date.

        Raises
        ------
        RuntimeError
            It is not built yet.
        """
        if self._shadow is None:
            raise RuntimeError(
                f"EMAHook has no averaged model of {self.model_key!r} yet: it is built at SETUP, or else at the first "
                f"executed step that counts (start_step={self.start_step}, update_every={self.update_every})."
            )
        return self._shadow.averaged

    def state_dict(self) -> dict[str, Any]:
        """Return settings, counter and average as plain data that later training does not change.

        Returns
        -------
        dict
            The settings, ``num_updates``, and once they are there ``averaged_model_state`` and ``accumulators``
            (float32, by name, only for weights in bfloat16 and float16). It loads with
            ``torch.load(weights_only=True)``.
        """
        self._settle()
        waiting = {name: plain_copy(value) for name, value in self._pending.items()}
        held = self._shadow.state() if self._shadow is not None else waiting
        return {**self._settings(), "num_updates": self.num_updates, **held}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state. Before the average is built, the weights in it wait until then.

        Parameters
        ----------
        state : mapping
            What `state_dict` returned. Settings and ``num_updates`` may be absent; without ``averaged_model_state``
            there is no average any more, and it is built anew.

        Raises
        ------
        ValueError
            A setting differs, or the averaged weights do not fit: both values are named, nothing has changed.
        """
        self._settle()
        refuse_other_settings(self._settings(), state)
        num_updates = update_count(state, default=self.num_updates)
        weights = state.get("averaged_model_state")
        if weights is None:
            self._shadow, self._pending = None, {}
        elif self._shadow is not None:
            self._shadow.load(weights, state.get("accumulators", {}))
        else:
            held = {"averaged_model_state": weights, "accumulators": state.get("accumulators", {})}
            self._pending = {name: plain_copy(value) for name, value in held.items() if value}
        self.num_updates = num_updates

    def __getstate__(self) -> dict[Any, Any]:
        """Settle first: a step that is under way stays behind."""
        self._settle()
        return super().__getstate__()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Settle first: a step that is under way stays behind."""
        self._settle()
        return super().__deepcopy__(memo)

    def _build_averaged_model(self, source: nn.Module) -> AveragedModel:
        """Return an `AveragedModel` around a copy of `source`, the model without its wrappers.

        Override it to supply a copy of your own, a sharded one for example. The hook updates the copy by itself, so the
        averaging function that it was built with does not matter.
        """
        return averaged_copy(source, decay=self.decay, use_buffers=self.use_buffers)

    def _count(self, shadow: Shadow) -> None:
        shadow.count()
        self.num_updates += 1

    def _leave_to_settled(self, ctx: TrainContext | None) -> None:
        """Note the step of an update that may have been vetoed, or None; pydantic's own way takes 5 us."""
        assert self.__pydantic_private__ is not None
        self.__pydantic_private__["_unsettled"] = ctx

    def _counts(self, ctx: TrainContext) -> bool:
        completed = ctx.step_count + 1
        return completed >= self.start_step and completed % self.update_every == 0

    def _settle(self) -> None:
        """Have an undecided update decided, for whoever reads the counter."""
        ctx = self._unsettled
        if ctx is not None:
            self.settled(ctx, skipped=ctx.step_skipped)  # asking decides; most often it has settled us by itself then

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in type(self).model_fields if name != "num_updates"}

    def _source(self, ctx: TrainContext) -> nn.Module:
        try:
            return bare_module(ctx.models[self.model_key])
        except KeyError:
            raise KeyError(
                f"EMAHook averages the model {self.model_key!r}, but the models are {sorted(ctx.models)}; "
                "set model_key to one of them."
            ) from None

    def _fitted_shadow(self, source: nn.Module) -> Shadow:
        shadow = self._shadow
        if shadow is None:
            builder = f"{type(self).__name__}._build_averaged_model"
            averaged = finished(self._build_averaged_model(source), builder)
            shadow = Shadow(averaged, decay=self.decay, use_buffers=self.use_buffers)
        shadow.match(source)
        if self._pending:
            shadow.load(self._pending["averaged_model_state"], self._pending.get("accumulators", {}))
        self._shadow, self._pending = shadow, {}
        return shadow
