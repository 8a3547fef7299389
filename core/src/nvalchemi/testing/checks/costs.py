"""What the hook costs, in exact counts; and whether it works on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nvalchemi.testing.checks.base import Batches, Checks, check, require
from nvalchemi.testing.host_reads import HostReads
from nvalchemi.training.hooks import TrainingUpdateHook

if TYPE_CHECKING:
    from nvalchemi.hooks import TrainContext

__all__ = ["CostChecks"]


class _DefersVeto(TrainingUpdateHook):
    """Has the host read once a step, as any hook does that decides on the device; further flags ride along."""

    reads_grad = False
    defers_veto = True
    priority = -1

    def before_optimizer_step(self, ctx: TrainContext, *, will_skip: bool) -> bool:
        ctx.defer_veto(torch.zeros(()), "never")
        return True


class CostChecks(Checks):
    """Host reads, and devices."""

    @check(
        "decide on the device (ctx.defer_veto, torch.where) and read with ctx.read_later; or declare what it costs in "
        "host_reads on the test class and on the hook's card."
    )
    def test_its_host_reads_are_declared(self) -> None:
        """A step waits for the device as often as declared, besides the one read that all hooks share."""
        batches = self.batches(4)
        without = self._reads(batches)
        reads = self._reads(batches, self.fresh_hook())
        worst = max(len(own) - len(base) for own, base in zip(reads, without, strict=True))
        where = sorted({site for step in reads for site in step} - {site for step in without for site in step})
        require(worst <= self.host_reads, f"{worst} host reads a step, {self.host_reads} declared: {', '.join(where)}")

    @check("make tensors on the device of what they meet: torch.zeros_like(x), torch.zeros((), device=x.device).")
    def test_it_trains_on_a_gpu(self) -> None:
        """On a GPU it trains, and what it does to the weights is what it does on a CPU, but for rounding."""
        self.applies(self.supports_cuda, "supports_cuda is False")
        self.applies(torch.cuda.is_available(), "no GPU here")
        strategies = [self.trained(self.fresh_hook(), batches=self.batches(3), devices=d) for d in ("cpu", "cuda")]
        for one, other in zip(*(strategy.models["main"].parameters() for strategy in strategies), strict=True):
            require(other.is_cuda, "the weights are not on the GPU any more")
            torch.testing.assert_close(other.detach().cpu(), one.detach(), rtol=1e-3, atol=1e-4)

    def _reads(self, batches: Batches, *hooks: Any) -> list[list[str]]:
        """Return for each batch where the host read, once the first ones have set everything up."""
        reads = []
        with self.stepwise(_DefersVeto(), *hooks) as strategy:
            for batch in batches:
                strategy.train_batch(batch)
            for batch in batches:
                with HostReads() as counted:
                    strategy.train_batch(batch)
                reads.append(counted.sites)
        return reads
