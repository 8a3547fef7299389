"""What DDPHook and FSDPHook have in common: the group, the models they take, and the data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import distributed, nn

from nvalchemi.errors import HookConflictError
from nvalchemi.hooks import TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi_hooks_distributed.joining import join, ranks
from nvalchemi_hooks_distributed.loading import part_of, samplers_of

__all__ = ["SpreadingHook"]


class SpreadingHook:
    """Joins the process group, spreads the models over it, and gives every rank its part of the data.

    With one process it does nothing.
    """

    frequency = 1
    stage: TrainingStage | None = None
    evaluates_alone = True  # a rank can evaluate what another does not

    def __init__(
        self,
        *,
        models: str | Sequence[str] | None,
        split_data: bool,
        seed: int,
        backend: str | None,
        timeout: float,
    ) -> None:
        name = type(self).__name__
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
            raise ValueError(f"{name}(timeout={timeout!r}): give the seconds that a rank waits for another, above 0.")
        self.models = (models,) if isinstance(models, str) else None if models is None else tuple(models)
        self.split_data, self.seed, self.backend, self.timeout = split_data, seed, backend, float(timeout)
        self._loaders: list[tuple[Any, Any]] = []  # as given, and this rank's part

    def _runs_on_stage(self, stage: TrainingStage) -> bool:
        return stage in (TrainingStage.SETUP, TrainingStage.BEFORE_EPOCH)

    def __call__(self, ctx: TrainContext, stage: TrainingStage) -> None:
        """Spread the models at SETUP, and tell samplers the epoch at BEFORE_EPOCH."""
        if stage is TrainingStage.BEFORE_EPOCH:
            for loader in (part for _, part in self._loaders):
                for sampler in samplers_of(loader):
                    sampler.set_epoch(ctx.epoch)
            return
        self._chosen(ctx)  # a wrong name is found with one process too
        assert ctx.device is not None
        join(ctx.device, self.backend, self.timeout)
        if ranks() > 1:
            for name in self._chosen(ctx):
                self._refuse(name, ctx.models[name])
                ctx.models[name] = self.spread(ctx.models[name], ctx)

    def spread(self, model: nn.Module, ctx: TrainContext) -> nn.Module:
        """Return the model to train in place of the bare one."""
        raise NotImplementedError

    def prepare_loader(self, loader: Any, *, training: bool) -> Iterable[Any]:
        """Return this rank's part of a loader; see `nvalchemi.hooks.PreparesLoader`."""
        if ranks() == 1:
            return loader  # type: ignore[no-any-return]
        for given, part in self._loaders:
            if given is loader:
                return part  # type: ignore[no-any-return]
        part = loader
        if self.split_data:
            even = training or not self.evaluates_alone
            part = part_of(loader, distributed.get_rank(), ranks(), training=training, even=even, seed=self.seed)
        self._loaders = [*self._loaders[-3:], (loader, part)]
        return part  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_loaders": []}

    def _chosen(self, ctx: TrainContext) -> list[str]:
        if self.models is None:
            trained = ctx.trained
            return [name for name in ctx.models if trained is None or name in trained]
        for name in self.models:
            if name not in ctx.models:
                raise HookConflictError(
                    f"{type(self).__name__}(models={self.models!r}): there is no model {name!r}, only "
                    f"{sorted(ctx.models)}."
                )
        return list(self.models)

    def _refuse(self, name: str, model: nn.Module) -> None:
        hook = type(self).__name__
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise HookConflictError(
                f"{hook}: models[{name!r}] is a {type(model).__name__} already; give the bare model, or leave out the "
                "hook, or leave the model out of its models=."
            )
        if any(hasattr(part, "set_requires_gradient_sync") for part in model.modules()):
            raise HookConflictError(
                f"{hook}: models[{name!r}] is sharded already (fully_shard); give the bare model, and one hook that "
                "spreads it."
            )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise HookConflictError(
                f"{hook}: models[{name!r}] has no parameter that is trained, so there is nothing to reduce; leave it "
                "out of models=."
            )
