"""Features, broken one at a time: what the sequences must find."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest

from nvalchemi.hooks.context import HookContext
from nvalchemi.training import EMAHook, GradientAccumulationHook, GradScalerVetoHook, strategy_state
from nvalchemi.training import strategy as strategy_module
from nvalchemi.training.hooks import TrainingUpdateOrchestrator, conductor, stepping
from nvalchemi.training.hooks.window import UpdateWindow
from nvalchemi.training.step_count import StepCount
from nvalchemi_hooks_loss_scaling.scaler import LossScaler

Break = Callable[[pytest.MonkeyPatch], None]
DEFECTS: dict[str, Break] = {}


def _defect(break_it: Break) -> Break:
    DEFECTS[break_it.__name__] = break_it
    return break_it


@_defect
def schedulers_move_on_a_skip(patch):
    real = stepping.step_schedulers
    patch.setattr(
        stepping, "step_schedulers", lambda schedulers, optimizers, moved: real(schedulers, optimizers, optimizers)
    )


@_defect
def the_average_follows_a_skip(patch):
    real = EMAHook.after_optimizer_step
    patch.setattr(EMAHook, "after_optimizer_step", lambda self, ctx, *, skipped: real(self, ctx, skipped=False))


@_defect
def gradients_are_not_zeroed(patch):
    patch.setattr(conductor, "forget_gradients", lambda optimizers: None)


@_defect
def a_load_forgets_num_updates(patch):
    real = EMAHook.load_state_dict

    def load(self, state):
        real(self, state)
        self.num_updates = 0

    patch.setattr(EMAHook, "load_state_dict", load)


@_defect
def the_first_update_after_a_load_copies(patch):
    real = EMAHook.load_state_dict

    def load(self, state):
        real(self, state)
        self.get_averaged_model().n_averaged.zero_()

    patch.setattr(EMAHook, "load_state_dict", load)


@_defect
def a_veto_on_finite_gradients_grows_the_scale(patch):
    real = LossScaler.close
    patch.setattr(LossScaler, "close", lambda self, found_inf: real(self, False if found_inf is None else found_inf))


@_defect
def gradients_stay_scaled(patch):
    patch.setattr(LossScaler, "divisor", lambda self, device: self._of_window().to(device) * 0 + 1)


@_defect
def contexts_stay_open(patch):
    patch.setattr(HookContext, "__exit__", lambda self, kind, error, traceback: None)


@_defect
def a_hook_keeps_the_graph(patch):
    def keep(self, ctx, loss):
        self.kept = loss
        return loss

    patch.setattr(GradScalerVetoHook, "transform_loss", keep)


@_defect
def skipped_steps_are_counted(patch):
    real = StepCount.add
    patch.setattr(StepCount, "add", lambda self, steps: real(self, 1))


@_defect
def a_load_forgets_optimizers(patch):
    patch.setattr(strategy_state, "load_steppers", lambda steppers, states, undo: None)


@_defect
def a_load_forgets_gradients(patch):
    patch.setattr(strategy_state, "load_gradients", lambda models, gradients: None)


@_defect
def a_load_forgets_the_window(patch):
    patch.setattr(TrainingUpdateOrchestrator, "go_on", lambda self, *, window_open: None)


@_defect
def evaluation_moves_buffers(patch):
    patch.setattr(strategy_module, "evaluation_mode", lambda models: nullcontext())


@_defect
def vetoes_on_the_device_do_not_count(patch):
    real = UpdateWindow.fold

    def fold(self):
        common, own = real(self)
        return common if common is None else common * 0, [flag if flag is None else flag * 0 for flag in own]

    patch.setattr(UpdateWindow, "fold", fold)


@_defect
def every_batch_begins_a_window(patch):
    patch.setattr(conductor, "_OPEN", conductor._SKIPPED)


@_defect
def a_load_forgets_how_much_a_window_holds(patch):
    real = GradientAccumulationHook.load_state_dict
    patch.setattr(GradientAccumulationHook, "load_state_dict", lambda self, state: real(self, {**state, "batches": 0}))
