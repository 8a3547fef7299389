"""Whether the hook votes as it should, and leaves alone what is not its own."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from nvalchemi.hooks import TrainContext
from nvalchemi.testing.checks.base import Checks, check, everything_of, require, state_of, weights_of
from nvalchemi.testing.compare import first_difference
from nvalchemi.testing.doubles import AccumulatingHook, LossFactorHook, VetoingHook
from nvalchemi.training import OptimizerConfig
from nvalchemi.training.hooks import TrainingUpdateHook

__all__ = ["DecisionChecks"]


class _VetoWithSnapshot(VetoingHook):
    """Vetoes a batch, before anybody else votes, and remembers how everything was."""

    def __init__(self, *batches: int) -> None:
        super().__init__(*batches, priority=-1)
        self.before: dict[str, Any] = {}

    def before_optimizer_step(self, ctx: TrainContext, *, will_skip: bool) -> bool:
        if ctx.batch_count in self.batches:
            self.before = everything_of(ctx.workflow)
        return super().before_optimizer_step(ctx, will_skip=will_skip)


class _DefersVeto(TrainingUpdateHook):
    """Vetoes one batch with a flag that is still on the device."""

    reads_grad = False
    defers_veto = True
    priority = -1

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def before_optimizer_step(self, ctx: TrainContext, *, will_skip: bool) -> bool:
        ctx.defer_veto(torch.tensor(ctx.batch_count == self.batch), f"a test vetoes batch {self.batch}")
        return True


class DecisionChecks(Checks):
    """Votes, vetoes, losses and order."""

    @check("return True or False, on every path; a decision that is still a tensor goes to ctx.defer_veto.")
    def test_it_answers_with_a_real_bool(self) -> None:
        """Whether to proceed is True or False where it is asked: also when an earlier hook has vetoed already."""
        self.needs_update_hook()
        keeps_gradients, vetoes = AccumulatingHook(every=2, priority=-2), VetoingHook(1, priority=-1)
        self.trained(keeps_gradients, vetoes, self.fresh_hook(), batches=self.batches(4))

    @check("return at once where will_skip or skipped is True; a plain hook looks at ctx.step_skipped.")
    def test_after_a_veto_it_changes_nothing(self) -> None:
        """Called after a veto, it changes neither weights nor gradients nor the state of optimizers and schedulers."""
        veto = _VetoWithSnapshot(1)
        with self.stepwise(veto, self.fresh_hook()) as strategy:
            for batch in self.batches(2):
                ctx = strategy.train_batch(batch)
            require(ctx.step_skipped, "the step was taken although another hook vetoed it")
            difference = first_difference(veto.before, everything_of(strategy), "before and after")
            require(not difference, f"after a veto {difference}")

    @check(
        "return False from before_optimizer_step, or call ctx.defer_veto there; see vetoed_batch for what provokes it."
    )
    def test_its_veto_holds_for_everything(self) -> None:
        """When it vetoes, no optimizer and no scheduler moves."""
        self.applies(self.vetoes, "vetoes is False: it never vetoes")
        good, bad = self.batches(2, vetoed=[1])
        with self.stepwise(self.fresh_hook()) as strategy:
            strategy.train_batch(good)
            before = everything_of(strategy)
            ctx = strategy.train_batch(bad)
            after = everything_of(strategy)
        require(ctx.step_skipped, "the batch of vetoed_batch() was stepped; it does not provoke a veto")
        for part in ("weights", "optimizers", "schedulers"):
            difference = first_difference(before[part], after[part], part)
            require(not difference, f"the step was vetoed, but {difference}")

    @check("count in `settled`, not before; where defers_veto is True look at ctx.veto_flag besides `skipped`.")
    def test_a_lazy_outcome_trains_the_same(self) -> None:
        """It trains the same weights to the same state, bit for bit, whether vetoes are known at once or later."""
        config = OptimizerConfig(optimizer_cls="SGD", optimizer_kwargs={"lr": 0.05, "momentum": 0.9, "fused": True})
        ends = []
        for lazy in (False, True):
            hook = self.fresh_hook()
            batches = self.batches(6, vetoed=[4])
            strategy = self.trained(_DefersVeto(2), hook, batches=batches, optimizer_configs=config, lazy=lazy)
            ends.append(
                {
                    "weights": weights_of(strategy),
                    "state": self.progress_in(state_of(hook)),
                    "steps": strategy.step_count,
                }
            )
        difference = first_difference(ends[0], ends[1], "run")
        require(not difference, f"with an eager and with a lazy outcome {difference}")

    @check("set vetoes = True on the test class, and vetoed_batch to what provokes it; or do not veto.")
    def test_it_vetoes_only_if_it_says_so(self) -> None:
        """A hook that declares no vetoes lets every step be taken, also one on gradients that are not finite."""
        self.applies(not self.vetoes, "vetoes is True: it may veto")
        self.needs_update_hook()
        with self.stepwise(self.fresh_hook()) as strategy:
            for good in self.batches(2):
                strategy.train_batch(good)
                outcome = strategy.train_batch(Checks.vetoed_batch(self, good)).outcome
                vetoes = outcome.vetoes if outcome else ()
                require(not vetoes, f"it vetoed: {vetoes}")

    @check("return a new tensor, loss * factor for example, instead of changing the one that was given in place.")
    def test_it_leaves_the_given_loss_alone(self) -> None:
        """The loss it is given keeps its value: others log it, and it is what ctx.loss says afterwards."""
        self.applies(self.transforms_loss, "transforms_loss is False: it returns the loss as it is")
        losses: list[float] = []

        def loss_fn(predictions: Any, batch: Any) -> Any:
            loss = (predictions - batch[1]).square().mean()
            losses.append(loss.item())
            return loss

        with self.stepwise(self.fresh_hook(), loss_fn=loss_fn) as strategy:
            for batch in self.batches(3):
                loss = strategy.train_batch(batch).loss
                holds = loss is not None and loss.item() == losses[-1]
                require(holds, f"the loss was {losses[-1]}, ctx.loss says {loss}")

    @check("act by `priority`, not by the place in the list of hooks, nor by what was made before.")
    def test_the_order_of_insertion_does_not_matter(self) -> None:
        """Given before, between or after others, it trains the same weights, bit for bit."""
        expected = None
        for order in itertools.permutations(range(3)):
            others = [LossFactorHook(0.5, priority=-1), VetoingHook(2, priority=1000), self.fresh_hook()]
            trained = self.trained(*(others[place] for place in order), batches=self.batches(4))
            expected = expected or weights_of(trained)
            difference = first_difference(expected, weights_of(trained), "weights")
            require(not difference, f"in another order of the hooks {difference}")
