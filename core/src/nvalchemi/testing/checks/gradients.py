"""Whether the hook copes with every kind of gradient and every way of grouping parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nvalchemi.errors import HookConflictError
from nvalchemi.testing.checks.base import Batches, Checks, check, require, weights_of
from nvalchemi.testing.compare import first_difference
from nvalchemi.testing.scaling import FixedScaleHook
from nvalchemi.testing.tiny import TinyModel, tiny_batches
from nvalchemi.training import OptimizerConfig, TrainingStage, TrainingStrategy

if TYPE_CHECKING:
    from nvalchemi.hooks import TrainContext

__all__ = ["GradientChecks"]

_ROUNDING = 1e-5  # sums are taken in another order


class _WithUnused(TinyModel):
    """Has a parameter that takes no part in the forward, so that its gradient is None."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))


class _Table(nn.Module):
    """A table with sparse gradients; only its even rows are ever looked up, one of them twice in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 4, sparse=True)
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        predictions: Tensor = self.last(self.rows(torch.arange(len(x)) % 3 * 2))
        return predictions


class _Gradients:
    """Writes down dtype and layout of the gradients as the optimizer saw them, by parameter name."""

    frequency, stage = 1, TrainingStage.AFTER_OPTIMIZER_STEP

    def __init__(self) -> None:
        self.seen: dict[str, tuple[torch.dtype, torch.layout] | None] = {}

    def __call__(self, ctx: TrainContext, stage: TrainingStage) -> None:
        for model in ctx.models.values():
            for name, parameter in model.named_parameters():
                grad = parameter.grad
                self.seen[name] = None if grad is None else (grad.dtype, grad.layout)


def _sgd(parameters: Callable[[Any], Iterable[Any]] | None = None, *, momentum: float = 0.9) -> OptimizerConfig:
    options = {"lr": 0.05, "momentum": momentum}
    return OptimizerConfig(optimizer_cls="SGD", optimizer_kwargs=options, parameters=parameters)


def _seeded(model: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)  # as tiny_strategy does for its own
    return model()


class GradientChecks(Checks):
    """Groups, optimizers, kinds of gradients, and a loss scale."""

    @check("go through ctx.optimizers, not the first of them, or use ctx.window, which knows them all.")
    def test_several_optimizers_train_as_one(self) -> None:
        """Two optimizers with the settings of one train the same weights."""
        halves = [_sgd(lambda model: model.first.parameters()), _sgd(lambda model: model.last.parameters())]
        self._same_as_one_optimizer({"main": halves}, "with two optimizers")

    @check("go through every group of optimizer.param_groups, not the first, or use ctx.window.")
    def test_several_groups_train_as_one(self) -> None:
        """Two parameter groups with the settings of one train the same weights."""
        groups = _sgd(lambda model: [{"params": half.parameters()} for half in (model.first, model.last)])
        self._same_as_one_optimizer(groups, "with two groups")

    @check("pass over parameters whose .grad is None; do not give them one.")
    def test_a_gradient_may_be_none(self) -> None:
        """A parameter without a gradient stays as it is, and the others are trained as if it were not there."""
        gradients, batches = _Gradients(), tiny_batches(3)
        alone = self.trained(self.fresh_hook(), batches=batches)
        trained = self.trained(self.fresh_hook(), gradients, batches=batches, models=_seeded(_WithUnused))
        weights = weights_of(trained)
        require(gradients.seen["unused"] is None, "the parameter that takes no part was given a gradient")
        require(bool((weights.pop("main.unused") == 1).all()), "the parameter that takes no part was changed")
        difference = first_difference(weights_of(alone), weights, "weights", tolerance=_ROUNDING)
        require(not difference, f"a parameter without a gradient disturbs the others: {difference}")

    @check("change the values of a sparse gradient (grad.coalesce().values(), or ctx.window.tensors()), or refuse it.")
    def test_a_gradient_may_be_sparse(self) -> None:
        """A sparse gradient stays sparse, and rows that no batch looked up stay where they are."""
        self.applies(self.sparse_gradients, "sparse_gradients is False: the hook does not take them")
        gradients, table = _Gradients(), _seeded(_Table)
        start = table.rows.weight.detach().clone()
        self.trained(
            self.fresh_hook(), gradients, batches=tiny_batches(3), models=table, optimizer_configs=_sgd(momentum=0.0)
        )
        seen = gradients.seen["rows.weight"]
        require(seen is not None and seen[1] is torch.sparse_coo, f"the sparse gradient became {seen}")
        moved = (table.rows.weight.detach() != start).any(dim=1)
        require(bool(table.rows.weight.isfinite().all()), "the table is not finite any more")
        require(not moved[1::2].any(), "rows that no batch looked up have moved")
        require(bool(moved[0]), "rows that were looked up have not moved")

    @check("compute in float32 if you must, and write back in the dtype that was there; do not replace .grad.")
    def test_weights_may_have_low_precision(self) -> None:
        """Weights and gradients in bfloat16 keep their dtype, stay finite and are trained."""
        self.applies(self.low_precision, "low_precision is False: the hook does not take weights in bfloat16")
        gradients, model = _Gradients(), _seeded(TinyModel).to(torch.bfloat16)
        start = model.first.weight.detach().clone()
        self.trained(self.fresh_hook(), gradients, batches=tiny_batches(3, dtype=torch.bfloat16), models=model)
        dtypes = {seen[0] for seen in gradients.seen.values() if seen} | {p.dtype for p in model.parameters()}
        require(dtypes == {torch.bfloat16}, f"weights and gradients now are {sorted(map(str, dtypes))}")
        require(all(bool(p.isfinite().all()) for p in model.parameters()), "weights are not finite any more")
        require(not torch.equal(model.first.weight, start), "no weight has moved")

    @check(
        "set reads_grad = True if the hook looks at .grad; use ctx.gradients, ctx.grad_norm and ctx.window for true "
        "gradients; multiply a loss, and add nothing to it."
    )
    def test_a_loss_scale_changes_nothing(self) -> None:
        """Under a loss scale, a power of two, it trains the same weights, bit for bit: it sees true gradients."""
        self.needs_update_hook()
        batches = self.batches(4)
        plain = self._trained_fused(batches)
        self.applies(plain is not None, "the hook scales the loss by itself")
        try:
            scaled = self._trained_fused(batches, FixedScaleHook(1024.0))
        except HookConflictError as refusal:
            self.applies(False, f"the hook refuses a loss scale: {refusal}")
        difference = first_difference(plain, scaled, "weights")
        require(not difference, f"with a loss scale of 1024 {difference}")

    def _trained_fused(self, batches: Batches, *scaling: Any) -> dict[str, Tensor] | None:
        """Return the weights of a run whose optimizer unscales by itself; None if the hook brings a scaler."""
        config = OptimizerConfig(optimizer_cls="SGD", optimizer_kwargs={"lr": 0.05, "momentum": 0.9, "fused": True})
        with self.stepwise(self.fresh_hook(), *scaling, optimizer_configs=config) as strategy:
            for batch in batches:
                ctx = strategy.train_batch(batch)
                if ctx.grad_scaler is not None and not scaling:
                    return None
            return weights_of(strategy)

    def _same_as_one_optimizer(self, configs: Any, how: str) -> None:
        batches = self.batches(4, vetoed=[2])
        one = self.trained(self.fresh_hook(), batches=batches, optimizer_configs=_sgd())
        split: TrainingStrategy = self.trained(self.fresh_hook(), batches=batches, optimizer_configs=configs)
        require(one.step_count == split.step_count, f"{how} {split.step_count} steps were taken, not {one.step_count}")
        difference = first_difference(weights_of(one), weights_of(split), "weights", tolerance=_ROUNDING)
        require(not difference, f"{how} {difference}")
