"""What a hook is told: the state of one batch, and the powers a hook has over it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import InitVar, dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from nvalchemi.hooks.batch_context import BatchContext
from nvalchemi.hooks.update_powers import UpdatePowers

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from nvalchemi.training.hooks.pending import PendingStep
    from nvalchemi.training.hooks.stepping import StepOutcome
    from nvalchemi.training.hooks.window import UpdateWindow

__all__ = ["BatchContext", "HookContext", "TrainContext"]


@dataclass(kw_only=True, slots=True, eq=False)
class HookContext:
    """What every engine tells its hooks, whatever it does.

    Parameters
    ----------
    batch : Any
        The batch at hand, on its device.
    step_count : int
        Steps that were executed before this moment.
    device : torch.device, optional
        Where the work is done.
    global_rank : int
        The number of this process among all; 0 when there is one.
    workflow : Any
        The engine itself, for what is nowhere else.
    """

    batch: Any = None
    step_count: int = 0
    device: torch.device | None = None
    global_rank: int = 0
    workflow: Any = None
    _opened: list[BatchContext] = field(default_factory=list, init=False, repr=False)

    @property
    def possible_step_counts(self) -> tuple[int, ...]:
        """What `step_count` may turn out to be."""
        return (self.step_count,)

    def enter_batch_context(self, manager: AbstractContextManager[Any]) -> BatchContext:
        """Open a context that is closed when the batch ends, whatever raises.

        Hooks open autocast, ``no_sync`` and their like only through this.

        Parameters
        ----------
        manager : context manager
            It is entered at once.

        Returns
        -------
        BatchContext
            Its ``close()`` leaves the context earlier; ``value`` is what entering gave.

        Examples
        --------
        >>> import torch
        >>> with TrainContext() as ctx:
        ...     handle = ctx.enter_batch_context(torch.autocast("cpu", torch.bfloat16))
        ...     torch.is_autocast_enabled("cpu")
        True
        >>> torch.is_autocast_enabled("cpu")
        False
        """
        return BatchContext(manager, self._opened)

    def close(self, error: BaseException | None = None) -> None:
        """Close what was opened for this batch, the last first; `error` is the one under way, if any."""
        if self._opened:
            self._opened[0].close(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(error)


@dataclass(kw_only=True, slots=True, eq=False)
class TrainContext(UpdatePowers, HookContext):
    """One batch of training, shared by all hooks of the batch and dropped afterwards.

    In a loop of your own use it as a context manager, so that everything opened for the batch is closed and no graph
    outlives it::

        with TrainContext(models={"main": model}, optimizers=[optimizer], step_count=step) as ctx:
            orchestrator(ctx, TrainingStage.BEFORE_BATCH)
            ctx.loss = loss_fn(model(x), y)
            orchestrator(ctx, TrainingStage.DO_BACKWARD)
            orchestrator(ctx, TrainingStage.DO_OPTIMIZER_STEP)
            orchestrator(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
        step += not ctx.step_skipped

    Parameters
    ----------
    model : torch.nn.Module, optional
        The main model; by default ``models["main"]``, or the only one there is.
    models : mapping of str to torch.nn.Module
        All models by name. A plain hook may replace entries at SETUP, and nowhere else.
    trained : collection of str, optional
        Names of the models that have an optimizer; None where nobody says.
    optimizers : sequence of torch.optim.Optimizer
        The optimizers of the update.
    lr_schedulers : sequence
        Their schedulers; each moves with the optimizer it was made for.
    loss : torch.Tensor, optional
        None before the loss exists, live from AFTER_LOSS to DO_BACKWARD, detached and untransformed afterwards.
    losses : mapping of str to torch.Tensor
        The named parts of the loss, if `loss_fn` gave several.
    grad_scaler : object, optional
        torch's scaler, anything with its public interface, or a `nvalchemi.hooks.GradientScaler`. The orchestrator
        alone unscales by it, steps through it and updates it, but it does not scale: a scaling hook does, or the loop
        (``ctx.loss = scaler.scale(loss)``). **A hook may set it** at BEFORE_BATCH.
    validation : mapping of str to float, optional
        The latest validation result.
    global_step_count : int
        Executed steps, counted once for every rank.
    batch_count : int
        Batches so far, over all epochs; every batch counts, also one whose step was skipped.
    epoch_step_count : int
        Batches so far in this epoch.
    epoch : int
        The number of this epoch, from 0.
    is_last_batch : bool
        No other batch follows in this pass. A strategy knows it if a hook asks for it; see
        `nvalchemi.hooks.LooksAhead`.
    window_complete : bool
        False while more batches follow before the optimizer steps. **A hook that accumulates sets it** at BEFORE_BATCH.
    step_skipped : bool
        From AFTER_OPTIMIZER_STEP on: no optimizer stepped. Set by whoever owns DO_OPTIMIZER_STEP.
    outcome : StepOutcome, optional
        From AFTER_OPTIMIZER_STEP on: who vetoed and why, and which optimizer stepped.
    window : UpdateWindow, optional
        The arithmetic of this window on its gradients; there once an orchestrator has seen the batch.
    pending : PendingStep, optional
        In lazy mode: the step whose outcome the host has not asked for yet, this batch's own or the one before. Reading
        `step_skipped`, `outcome`, `optimizers`, `lr_schedulers`, or a step count that depends on it, resolves it.

    Examples
    --------
    >>> TrainContext(step_count=3).window_complete
    True
    """

    if TYPE_CHECKING:
        model: nn.Module | None = None
    else:  # an argument only; what is read afterwards is the property below
        model: InitVar[nn.Module | None] = None
    models: MutableMapping[str, nn.Module] = field(default_factory=dict)
    trained: Collection[str] | None = None
    optimizers: Sequence[torch.optim.Optimizer] = ()
    lr_schedulers: Sequence[Any] = ()
    loss: Tensor | None = None
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    grad_scaler: Any = None
    validation: Mapping[str, float] | None = None
    global_step_count: int = 0
    batch_count: int = 0
    epoch_step_count: int = 0
    epoch: int = 0
    is_last_batch: bool = False
    window_complete: bool = True
    step_skipped: bool = False
    outcome: StepOutcome | None = None
    window: UpdateWindow | None = field(default=None, repr=False)
    pending: PendingStep | None = field(default=None, repr=False)

    def __post_init__(self, model: nn.Module | None = None) -> None:
        if model is not None:
            self.models = {"main": model, **self.models}

    @property
    def possible_step_counts(self) -> tuple[int, ...]:
        """What `step_count` may turn out to be: one number, or two while a step is pending. Nothing is resolved."""
        known: int = _STEP_COUNT.__get__(self)
        return (known, known + 1) if self.pending is not None and self.pending.counts_for(self) else (known,)

    @property
    def untouched_optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers, for whoever does not look at their learning rates. Nothing is resolved."""
        return _OPTIMIZERS.__get__(self)  # type: ignore[no-any-return]

    @property
    def raw_loss(self) -> Tensor | None:
        """The loss before any hook transformed it, detached: also in ``transform_loss``, where `loss` may be scaled.

        From AFTER_BACKWARD on it is `loss`; None before there is one.
        """
        raw = None if self.window is None else self.window.raw_loss
        return _detached(self.loss if raw is None else raw)  # type: ignore[no-any-return]

    def close(self, error: BaseException | None = None) -> None:
        """Close what was opened for this batch and let go of the graph."""
        self.let_go_of_graph()
        super(TrainContext, self).close(error)  # noqa: UP008 - a slotted dataclass is made anew, bare super() misses it

    def let_go_of_graph(self) -> None:
        """Detach the loss and its parts."""
        if getattr(self.loss, "requires_grad", False):
            self.loss = _detached(self.loss)
        if self.losses:
            self.losses = {name: _detached(value) for name, value in self.losses.items()}

    def when_resolved(self, follower: Callable[[TrainContext], None]) -> None:
        """Call a function with this context: now, or once the outcome of a pending step is known. Nothing is resolved.

        Examples
        --------
        >>> TrainContext(step_skipped=True).when_resolved(lambda ctx: print(ctx.step_skipped))
        True
        """
        if self.pending is None:
            follower(self)
        else:
            self.pending.then(follower)


def _detached(value: Any) -> Any:
    return value.detach() if hasattr(value, "detach") else value


def _main_model(ctx: TrainContext) -> nn.Module | None:
    return ctx.models["main"] if "main" in ctx.models else next(iter(ctx.models.values()), None)


# `model` is an argument of the context, and afterwards whatever `models` holds: a hook may replace it at SETUP.
TrainContext.model = property(_main_model)  # type: ignore[assignment, misc]


def _resolved_first(slot: Any) -> property:
    """Return a property over the slot of a field that resolves a pending step before the field is read."""

    def read(ctx: TrainContext) -> Any:
        if ctx.pending is not None:
            ctx.pending.resolve()
        return slot.__get__(ctx)

    return property(read, slot.__set__)


def _counted_first(slot: Any) -> property:
    """Return the same for a count of steps, which a step of this batch does not change before it is counted."""

    def read(ctx: TrainContext) -> Any:
        if ctx.pending is not None and ctx.pending.counts_for(ctx):
            ctx.pending.resolve()
        return slot.__get__(ctx)

    return property(read, slot.__set__)


_STEP_COUNT: Any = vars(HookContext)["step_count"]
_OPTIMIZERS: Any = vars(TrainContext)["optimizers"]
for _name in ("step_skipped", "outcome", "optimizers", "lr_schedulers"):
    setattr(TrainContext, _name, _resolved_first(getattr(TrainContext, _name)))
for _name in ("step_count", "global_step_count"):
    setattr(TrainContext, _name, _counted_first(getattr(TrainContext, _name)))
