"""Which stages a run dispatches, in which order, and what is there at each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nvalchemi.training import TrainingStage, Validation

S = TrainingStage
BATCH = [
    "BEFORE_BATCH",
    "BEFORE_FORWARD",
    "AFTER_FORWARD",
    "BEFORE_LOSS",
    "AFTER_LOSS",
    "BEFORE_BACKWARD",
    "DO_BACKWARD",
    "AFTER_BACKWARD",
    "BEFORE_OPTIMIZER_STEP",
    "DO_OPTIMIZER_STEP",
    "AFTER_OPTIMIZER_STEP",
    "AFTER_BATCH",
]
OPEN_STAGES = tuple(stage for stage in S if stage not in (S.DO_BACKWARD, S.DO_OPTIMIZER_STEP))


def without_slots(stages):
    return [stage for stage in stages if not stage.startswith("DO_")]


def test_a_run_dispatches_all_stages_in_the_order_of_the_loop(make_strategy, plain, trace, batches):
    """A run of two epochs dispatches every stage of the loop, nested as the docstring of the enum draws it."""
    log = []
    spy = plain(lambda ctx, stage: log.append(stage.name), *OPEN_STAGES)
    make_strategy(spy, num_epochs=2).run(batches[:2])
    epoch = ["BEFORE_EPOCH", *without_slots(BATCH) * 2, "AFTER_EPOCH"]
    assert log == ["SETUP", "BEFORE_TRAINING", *epoch, *epoch, "AFTER_TRAINING"]


def test_the_slots_are_dispatched_once_a_batch_in_their_place(make_strategy, plain, trace, batches):
    """DO_BACKWARD and DO_OPTIMIZER_STEP run once a batch, between the stages before and after them."""
    log = []
    spy = plain(lambda ctx, stage: log.append(stage.name), *OPEN_STAGES)
    update = trace()
    update.log = type("Slots", (), {"append": staticmethod(lambda entry: log.append("* " + entry[1]))})
    strategy = make_strategy(spy, update)
    strategy.train_batch(batches[0])
    order = [name.removeprefix("* ") for name in log if name == "* DO_BACKWARD" or not name.startswith("*")]
    assert order == ["SETUP", *[name for name in BATCH if name != "DO_OPTIMIZER_STEP"]]
    place = log.index("* DO_OPTIMIZER_STEP")
    assert log[place - 1] == "BEFORE_OPTIMIZER_STEP"
    assert log[place + 1] == "* AFTER_OPTIMIZER_STEP"
    assert log.count("* DO_OPTIMIZER_STEP") == 1


def test_train_batch_dispatches_the_stages_of_a_batch_and_nothing_of_the_loop(make_strategy, plain, batches):
    """`train_batch` outside of a run sets up once and then dispatches BEFORE_BATCH to AFTER_BATCH alone."""
    log = []
    strategy = make_strategy(plain(lambda ctx, stage: log.append(stage.name), *OPEN_STAGES))
    strategy.train_batch(batches[0])
    strategy.train_batch(batches[1])
    assert log == ["SETUP", *without_slots(BATCH) * 2]


def test_setup_comes_after_devices_and_before_optimizers(make_strategy, plain, batches):
    """SETUP comes after devices are settled and before optimizers are built."""
    seen = {}

    def look(ctx, stage):
        seen[stage.name] = (ctx.device, next(ctx.model.parameters()).device, len(ctx.optimizers))

    strategy = make_strategy(plain(look, S.SETUP, S.BEFORE_TRAINING), devices="cpu")
    strategy.run(batches)
    cpu = torch.device("cpu")
    assert seen == {"SETUP": (cpu, cpu, 0), "BEFORE_TRAINING": (cpu, cpu, 1)}


def test_setup_calls_plain_hooks_first_then_the_orchestrator(make_strategy, plain, trace, batches):
    """At SETUP plain hooks come first, wherever they stand in the list, then the update hooks."""
    log = []
    spies = [plain(lambda ctx, stage, n=n: log.append(n), S.SETUP) for n in ("first", "second")]
    make_strategy(trace(log), spies[0], trace(log).labelled("other"), spies[1]).setup()
    assert log == ["first", "second", ("trace", "SETUP"), ("other", "SETUP")]


def test_a_hook_that_owns_a_slot_is_still_plain_at_setup(make_strategy, plain, batches):
    """A plain hook of several stages, a slot among them, keeps its place among plain hooks at SETUP."""
    log = []
    owner = plain(
        lambda ctx, stage: log.append("owner") if stage is S.SETUP else ctx.loss.backward(), S.SETUP, S.DO_BACKWARD
    )
    later = plain(lambda ctx, stage: log.append("later"), S.SETUP)
    make_strategy(owner, later).run(batches)
    assert sorted(log) == ["later", "owner"]


def test_setup_runs_once_however_training_is_entered(make_strategy, plain, batches):
    """SETUP is dispatched once, also when runs, single batches and validations follow each other."""
    log = []
    strategy = make_strategy(plain(lambda ctx, stage: log.append(stage), S.SETUP))
    strategy.train_batch(batches[0])
    strategy.validate(batches)
    strategy.run(batches)
    strategy.run(batches)
    assert log == [S.SETUP]


def test_update_hooks_see_the_wrapped_model_at_setup(make_strategy, plain, trace):
    """What a plain hook put in `ctx.models` at SETUP is `ctx.model` and `ctx.models` for the update hooks there."""
    seen = []

    class Look(trace):
        def __call__(self, ctx, stage, will_skip=False):
            seen.append((ctx.models["main"], ctx.model))
            return True, ctx.loss

    def wrap(ctx, stage):
        ctx.models["main"] = nn.Sequential(ctx.models["main"])

    strategy = make_strategy(plain(wrap, S.SETUP), Look())
    strategy.setup()
    wrapped = strategy.models["main"]
    assert isinstance(wrapped, nn.Sequential)
    assert seen[0][0] is wrapped
    assert seen[0][1] is wrapped


@pytest.mark.parametrize("kind", ["replaced", "reparametrized"])
def test_the_optimizer_trains_what_setup_left_in_place(make_strategy, plain, batches, kind):
    """A model that a plain hook replaced at SETUP is the one whose parameters the optimizer trains."""
    new = nn.Linear(2, 1)

    def replace(ctx, stage):
        if kind == "replaced":
            ctx.models["main"] = new
        else:
            ctx.models["main"].weight = nn.Parameter(torch.zeros(1, 2))

    old = nn.Linear(2, 1)
    strategy = make_strategy(plain(replace, S.SETUP), models=old)
    strategy.setup()
    before = [p.detach().clone() for p in strategy.models["main"].parameters()]
    strategy.run(batches)
    trained = list(strategy.models["main"].parameters())
    assert strategy.models["main"] is (new if kind == "replaced" else old)
    assert [p for group in strategy.optimizers[0].param_groups for p in group["params"]] == trained
    assert not any(torch.equal(a, b) for a, b in zip(before, trained, strict=True))


def test_after_validation_is_an_event(make_strategy, plain, batches):
    """AFTER_VALIDATION is dispatched whenever a validation has ended, and holds its result."""
    log = []

    def note(ctx, stage):
        log.append(ctx.validation)

    strategy = make_strategy(plain(note, S.AFTER_VALIDATION), num_epochs=2, validation=Validation(loader=batches))
    result = strategy.validate()
    strategy.run(batches)
    assert len(log) == 3
    assert log[0] is result
    assert log[2] is strategy.validation_result
    assert log[2]["loss"] < log[0]["loss"]


def test_after_optimizer_step_and_after_batch_follow_a_veto_too(make_strategy, plain, veto, batches):
    """AFTER_OPTIMIZER_STEP and AFTER_BATCH are dispatched for a vetoed batch too; `ctx.step_skipped` says so."""
    log = []
    spy = plain(lambda ctx, stage: log.append((stage.name, ctx.step_skipped)), S.AFTER_OPTIMIZER_STEP, S.AFTER_BATCH)
    make_strategy(spy, veto(1)).run(batches[:2])
    assert log == [
        ("AFTER_OPTIMIZER_STEP", False),
        ("AFTER_BATCH", False),
        ("AFTER_OPTIMIZER_STEP", True),
        ("AFTER_BATCH", True),
    ]


def test_every_epoch_that_began_and_whose_pass_is_over_ends(make_strategy, plain, batches):
    """AFTER_EPOCH follows when the pass over the loader is over, also when the last step of the run ended it."""
    log = []
    strategy = make_strategy(
        plain(lambda ctx, stage: log.append(stage.name), S.BEFORE_EPOCH, S.AFTER_EPOCH), num_steps=8
    )
    strategy.run(batches)
    assert log == ["BEFORE_EPOCH", "AFTER_EPOCH"] * 2
    assert strategy.epoch == 2


def test_two_runs_dispatch_before_and_after_training_each(make_strategy, plain, batches):
    """BEFORE_TRAINING and AFTER_TRAINING are dispatched once a run."""
    log = []
    stages = (S.BEFORE_TRAINING, S.AFTER_TRAINING)
    strategy = make_strategy(plain(lambda ctx, stage: log.append((stage.name, ctx.step_count)), *stages))
    strategy.run(batches)
    strategy.run(batches)
    assert log == [("BEFORE_TRAINING", 0), ("AFTER_TRAINING", 4), ("BEFORE_TRAINING", 4), ("AFTER_TRAINING", 8)]
