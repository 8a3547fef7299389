"""One hook for each check of the kit, faulty in just the way that the check is for.

`test_conformance.py` runs pytest on a copy of this file. ``caught_by`` is the check that has to fail, and no other.
"""

from __future__ import annotations

import numpy
import torch

from nvalchemi.testing import HookConformance
from nvalchemi.training.hooks import TrainingUpdateHook

SET_AT_RUN_TIME = {}


class Good(TrainingUpdateHook):
    """Halves gradients, counts steps, keeps their sum; the faulty ones differ in one thing."""

    def __init__(self):
        self.steps = 0
        self.sum = torch.zeros(())
        self.opened = []

    def before_optimizer_step(self, ctx, *, will_skip):
        if not will_skip:
            for gradient in self.gradients(ctx):
                self.change(gradient)
        return True

    def gradients(self, ctx):
        return ctx.window.tensors()

    def change(self, gradient):
        gradient.mul_(0.5)

    def settled(self, ctx, *, skipped):
        self.steps += not skipped
        self.sum += 0 if skipped else 1

    def state_dict(self):
        return {"steps": self.steps, "sum": self.sum.clone()}

    def load_state_dict(self, state):
        self.steps, self.sum = state["steps"], state["sum"].clone()

    def __enter__(self):
        self.opened.append("a file")

    def __exit__(self, kind, error, traceback):
        self.close()

    def close(self):
        self.opened.clear()


class Case(HookConformance):
    """What all have in common."""

    __test__ = False
    stateful = True
    caught_by = ""


class TestGood(Case):
    factory = Good


class TestUndeclaredState(Case):
    caught_by = "test_the_switches_are_true"
    factory = Good
    stateful = False


class Found(Case):
    """Hooks of the made-up distributions that lie beside the copy."""

    __test__ = False
    factory = Good


class TestFound(Found):
    entry_point = "found"


class TestAnotherClass(Found):
    caught_by = "test_it_is_found_by_its_entry_point"
    entry_point = "another"


class TestUnlicensed(Found):
    caught_by = "test_its_metadata_is_complete"
    entry_point = "unlicensed"


class TestWithoutUpperBound(Found):
    caught_by = "test_it_declares_the_range_of_the_core"
    entry_point = "unbounded"


class TestImportsTorch(Found):
    caught_by = "test_listing_it_imports_no_torch"
    entry_point = "eager"


class NoneAfterAVeto(Good):
    def before_batch(self, ctx, *, will_skip):
        return None if will_skip else True


class TestNoneAfterAVeto(Case):
    caught_by = "test_it_answers_with_a_real_bool"
    factory = NoneAfterAVeto


class ChangesGradientsAfterAVeto(Good):
    def before_optimizer_step(self, ctx, *, will_skip):
        return super().before_optimizer_step(ctx, will_skip=False)


class TestChangesGradientsAfterAVeto(Case):
    caught_by = "test_after_a_veto_it_changes_nothing"
    factory = ChangesGradientsAfterAVeto


class ZeroStepInsteadOfAVeto(Good):
    def change(self, gradient):
        gradient.nan_to_num_(0.0, 0.0, 0.0)


class TestZeroStepInsteadOfAVeto(Case):
    caught_by = "test_its_veto_holds_for_everything"
    factory = ZeroStepInsteadOfAVeto
    vetoes = True


class VetoesInSecret(Good):
    defers_veto = True

    def before_optimizer_step(self, ctx, *, will_skip):
        ctx.defer_veto(ctx.window.nonfinite(), "not finite")
        return super().before_optimizer_step(ctx, will_skip=will_skip)


class TestVetoesInSecret(Case):
    caught_by = "test_it_vetoes_only_if_it_says_so"
    factory = VetoesInSecret
    defers_veto = True


class CountsBeforeItIsKnown(Good):
    reads_grad = False
    defers_veto = True

    def before_optimizer_step(self, ctx, *, will_skip):
        return True

    def after_optimizer_step(self, ctx, *, skipped):
        self.steps += not skipped

    def settled(self, ctx, *, skipped):
        pass


class TestCountsBeforeItIsKnown(Case):
    caught_by = "test_a_lazy_outcome_trains_the_same"
    factory = CountsBeforeItIsKnown
    reads_grad = False
    defers_veto = True


class ChangesTheLossInPlace(Good):
    def transform_loss(self, ctx, loss):
        return loss.mul_(2)


class TestChangesTheLossInPlace(Case):
    caught_by = "test_it_leaves_the_given_loss_alone"
    factory = ChangesTheLossInPlace
    transforms_loss = True


class ActsWhenFirst(Good):
    def gradients(self, ctx):
        return super().gradients(ctx) if ctx.workflow.hooks[0] is self else []


class TestActsWhenFirst(Case):
    caught_by = "test_the_order_of_insertion_does_not_matter"
    factory = ActsWhenFirst


class FirstOptimizer(Good):
    def gradients(self, ctx):
        return ctx.window.tensors(optimizer=0)


class TestFirstOptimizer(Case):
    caught_by = "test_several_optimizers_train_as_one"
    factory = FirstOptimizer


class FirstGroup(Good):
    def gradients(self, ctx):
        return [p.grad for o in ctx.optimizers for p in o.param_groups[0]["params"] if p.grad is not None]


class TestFirstGroup(Case):
    caught_by = "test_several_groups_train_as_one"
    factory = FirstGroup


class FillsGradients(Good):
    def gradients(self, ctx):
        for parameter in ctx.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return super().gradients(ctx)


class TestFillsGradients(Case):
    caught_by = "test_a_gradient_may_be_none"
    factory = FillsGradients


class MakesGradientsDense(Good):
    def gradients(self, ctx):
        for parameter in ctx.model.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        return super().gradients(ctx)


class TestMakesGradientsDense(Case):
    caught_by = "test_a_gradient_may_be_sparse"
    factory = MakesGradientsDense


class UnknownToBfloat16(Good):
    def change(self, gradient):
        if gradient.dim() == 2:
            torch.linalg.qr(gradient)
        super().change(gradient)


class TestUnknownToBfloat16(Case):
    caught_by = "test_weights_may_have_low_precision"
    factory = UnknownToBfloat16


class ReadsInSecret(Good):
    reads_grad = False

    def change(self, gradient):
        gradient.clamp_(-0.05, 0.05)


class TestReadsInSecret(Case):
    caught_by = "test_a_loss_scale_changes_nothing"
    factory = ReadsInSecret
    reads_grad = False


class ObjectBeforeTheFirstStep(Good):
    def state_dict(self):
        return {**super().state_dict(), "started": True if self.steps else Good}


class TestObjectBeforeTheFirstStep(Case):
    caught_by = "test_its_state_loads_before_the_first_step"
    factory = ObjectBeforeTheFirstStep


class NumpyAfterSomeSteps(Good):
    def state_dict(self):
        return {**super().state_dict(), "mean": numpy.float64(0.5) if self.steps else 0.0}


class TestNumpyAfterSomeSteps(Case):
    caught_by = "test_its_state_loads_after_some_steps"
    factory = NumpyAfterSomeSteps


class HandsOutItsSum(Good):
    def state_dict(self):
        return {"steps": self.steps, "sum": self.sum}


class TestHandsOutItsSum(Case):
    caught_by = "test_its_state_is_a_copy"
    factory = HandsOutItsSum


class KeepsTheSumItWasGiven(Good):
    def load_state_dict(self, state):
        self.steps, self.sum = state["steps"], state["sum"]


class TestKeepsTheSumItWasGiven(Case):
    caught_by = "test_its_state_is_a_copy"
    factory = KeepsTheSumItWasGiven


class CountsOutsideItsState(Good):
    factor = 1.0

    def change(self, gradient):
        self.factor *= 0.99
        gradient.mul_(self.factor)


class TestCountsOutsideItsState(Case):
    caught_by = "test_a_resumed_run_equals_a_straight_one"
    factory = CountsOutsideItsState


class ForgetsWhenPickled(Good):
    def __getstate__(self):
        return {**self.__dict__, "steps": 0}


class TestForgetsWhenPickled(Case):
    caught_by = "test_it_pickles"
    factory = ForgetsWhenPickled


class UsesAGlobal(Good):
    def __init__(self):
        super().__init__()
        SET_AT_RUN_TIME["factor"] = 0.5

    def change(self, gradient):
        gradient.mul_(SET_AT_RUN_TIME["factor"])


class TestUsesAGlobal(Case):
    caught_by = "test_it_survives_spawn"
    factory = UsesAGlobal


class ClosesOnce(Good):
    def close(self):
        self.opened.pop()


class TestClosesOnce(Case):
    caught_by = "test_it_closes_twice"
    factory = ClosesOnce


class ExpectsTheEnd(Good):
    def __exit__(self, kind, error, traceback):
        self.close()
        if error is not None:
            raise RuntimeError("the run has not ended")


class TestExpectsTheEnd(Case):
    caught_by = "test_it_closes_after_an_exception"
    factory = ExpectsTheEnd


class KeepsTheLoss(Good):
    last = None

    def transform_loss(self, ctx, loss):
        self.last = loss
        return loss * 1.0


class TestKeepsTheLoss(Case):
    caught_by = "test_it_keeps_no_graph_alive"
    factory = KeepsTheLoss
    transforms_loss = True


class AsksTheHost(Good):
    def settled(self, ctx, *, skipped):
        super().settled(ctx, skipped=skipped)
        self.loss = ctx.loss.item()


class TestAsksTheHost(Case):
    caught_by = "test_its_host_reads_are_declared"
    factory = AsksTheHost


class StaysOnTheCPU(Good):
    def change(self, gradient):
        gradient.copy_(gradient + torch.ones(gradient.shape))


class TestStaysOnTheCPU(Case):
    caught_by = "test_it_trains_on_a_gpu"
    factory = StaysOnTheCPU
    supports_cuda = True


class PlainLogger:
    """A plain hook without a fault."""

    frequency = 2

    def __init__(self):
        from nvalchemi.training import TrainingStage

        self.stage, self.losses = TrainingStage.AFTER_BATCH, []

    def __call__(self, ctx, stage):
        self.losses.append(ctx.loss)


class TestPlainLogger(HookConformance):
    caught_by = ""
    factory = PlainLogger


class PlainKeepsTheContext(PlainLogger):
    def __init__(self):
        super().__init__()
        from nvalchemi.training import TrainingStage

        self.stage, self.frequency = TrainingStage.AFTER_LOSS, 1


class TestPlainKeepsTheContext(HookConformance):
    caught_by = "test_it_keeps_no_graph_alive"
    factory = PlainKeepsTheContext
