"""A run that is stopped, saved, loaded into a new strategy and gone on with equals one that was not stopped."""

from __future__ import annotations

import copy
import random
import shutil
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from nvalchemi.errors import CheckpointWarning
from nvalchemi.training import OptimizerConfig, TrainingStage, Validation, load_training, save_training, take_snapshot

S = TrainingStage


@pytest.fixture
def all_hooks(kinds):
    return lambda: (kinds["Counting"](), kinds["Jitter"](), kinds["VetoAt"](2, 3, 9))


@pytest.mark.parametrize("length", [{"num_steps": 10}, {"num_steps": 12}, {"num_epochs": 3}])
@pytest.mark.parametrize("batch", [1, 3, 4, 6, 8, 12])
def test_any_batch_can_be_the_last_before_a_stop(resume, all_hooks, batch, length):
    """In the middle of a pass, after a vetoed step, at the last batch of a pass: everything is equal, bit for bit."""
    assert resume(S.AFTER_BATCH, lambda ctx: ctx.batch_count == batch, hooks=all_hooks, **length) == []


@pytest.mark.parametrize("stage", [S.BEFORE_EPOCH, S.AFTER_EPOCH])
def test_a_run_can_be_saved_between_passes(resume, all_hooks, stage):
    """The end and the beginning of a pass are no worse than its middle; AFTER_EPOCH is not dispatched twice."""
    assert resume(stage, lambda ctx: ctx.batch_count == 6, hooks=all_hooks, num_epochs=3) == []


@pytest.mark.parametrize("every", [{"every_steps": 2}, {"every_epochs": 1}])
@pytest.mark.parametrize("stage", [S.AFTER_BATCH, S.AFTER_VALIDATION, S.AFTER_EPOCH])
def test_validation_that_was_due_is_made_up_and_none_is_made_twice(
    resume, all_hooks, make_loader, make_strategy, stage, every
):
    """Random numbers that validation draws, and a scheduler that follows it, are the same whenever it was saved."""
    config = OptimizerConfig(
        optimizer_kwargs={"lr": 0.05}, scheduler_cls="ReduceLROnPlateau", scheduler_kwargs={"patience": 0}
    )
    found = resume(
        stage,
        lambda ctx: ctx.step_count >= 4,
        hooks=all_hooks,
        num_epochs=3,
        optimizer_configs=config,
        validation=Validation(loader=make_loader(), **every),
    )
    assert found == []


@pytest.mark.parametrize("batch", [1, 2, 3, 6, 7])
def test_an_open_window_goes_on(resume, kinds, batch):
    """Gradients that are being accumulated are saved, and only they: the next step is that of the whole window."""
    hooks = lambda: (kinds["Accumulate"](), kinds["Counting"]())  # noqa: E731 - two words, used once
    assert resume(S.AFTER_BATCH, lambda ctx: ctx.batch_count == batch, hooks=hooks, num_steps=5) == []


def test_gradients_are_saved_only_where_they_are_needed(make_strategy, make_loader, kinds):
    """After an executed step there are none in the state; inside a window there are."""
    strategy = make_strategy(kinds["Accumulate"]())
    batches = list(make_loader())
    strategy.train_batch(batches[0])
    assert set(strategy.state_dict()["gradients"]["main"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    strategy.train_batch(batches[1])
    assert "gradients" not in strategy.state_dict()


def test_a_generator_of_the_loaders_own_is_found_again(resume, all_hooks):
    """A DataLoader with its own generator gives the same order after a resume, in this pass and in the next ones."""
    at = lambda ctx: ctx.batch_count == 8  # noqa: E731 - two words, used once
    assert resume(S.AFTER_BATCH, at, hooks=all_hooks, own_seed=5, num_epochs=3) == []


def test_a_generator_of_the_loaders_own_is_found_again_between_passes(resume, all_hooks, make_loader):
    """Saved when one pass is over and the next has not begun, the next pass has the order it would have had."""
    plan = Validation(loader=list(make_loader()))
    at = lambda ctx: ctx.epoch == 1  # noqa: E731 - two words, used once
    assert resume(S.AFTER_VALIDATION, at, hooks=all_hooks, own_seed=5, num_epochs=3, validation=plan) == []


def test_a_loader_without_its_generator_is_refused(make_strategy, make_loader, tmp_path):
    """A loader that lacks the generator whose state was saved would give other batches: it is named."""
    strategy = make_strategy()
    strategy.run(make_loader(5))
    save_training(tmp_path, strategy)
    resumed = make_strategy()
    load_training(tmp_path, resumed)
    with pytest.raises(ValueError, match=r"holds the state of loader.generator, but this loader \(list\) has no such"):
        resumed.run(list(make_loader(5)))


def test_a_sampler_that_was_told_the_epoch_is_told_it_again(make_strategy, tmp_path, kinds):
    """The order of a DistributedSampler depends on the epoch that a hook tells it; a resumed pass has the same one."""
    data = TensorDataset(torch.randn(24, 6), torch.randn(24, 1))

    def make(seen):
        sampler = DistributedSampler(data, num_replicas=1, rank=0)
        tell = kinds["Plain"](lambda ctx, stage: sampler.set_epoch(ctx.epoch + 3), S.BEFORE_EPOCH)
        see = kinds["Plain"](lambda ctx, stage: seen.append(float(ctx.batch[0].sum())), S.AFTER_BATCH)
        return make_strategy(tell, see, num_steps=8), DataLoader(data, batch_size=4, sampler=sampler)

    straight, first, rest = [], [], []
    strategy, loader = make(straight)
    strategy.run(loader)
    strategy, loader = make(first)
    strategy.num_steps = 4
    strategy.run(loader)
    save_training(tmp_path, strategy)
    strategy, loader = make(rest)
    strategy.num_steps = 4
    load_training(tmp_path, strategy)
    strategy.run(loader)
    assert first + rest == straight


class Stream:
    """A loader that keeps its place itself, and draws each batch from a generator that nobody else can see."""

    def __init__(self):
        self.place, self.iterated, self.told = 0, [], 0
        self._random = random.Random(3)

    def __iter__(self):
        self.iterated.append(self.place)
        while self.place < 6:
            self.place += 1
            x = torch.full((4, 6), self._random.random())
            yield x, x.sum(1, keepdim=True)
        self.place = 0

    def state_dict(self):
        torch.rand(3)  # it may draw what it likes
        version, words, gauss = self._random.getstate()
        return {"place": self.place, "random": [version, list(words), gauss]}

    def load_state_dict(self, state):
        self.place = state["place"]
        self.told += 1
        version, words, gauss = state["random"]
        self._random.setstate((version, tuple(words), gauss))


@pytest.mark.parametrize("batch", [1, 4, 6, 8])
def test_a_loader_that_keeps_its_place_goes_on_there(resume, all_hooks, batch, tmp_path):
    """A loader with state_dict is asked for its place, and told it: no batch is loaded twice to be passed over."""
    made = []
    loader = lambda own_seed: made.append(Stream()) or made[-1]  # noqa: E731 - used once
    at = lambda ctx: ctx.batch_count == batch  # noqa: E731 - used once
    assert resume(S.AFTER_BATCH, at, hooks=all_hooks, loader=loader, num_epochs=3) == []
    assert made[1].iterated[0] == (batch if batch <= 6 else batch - 6)
    assert made[1].told == 1  # before it is iterated, not after
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    between = lambda ctx: ctx.epoch == 1  # noqa: E731 - used once
    plan = Validation(loader=[(torch.ones(4, 6), torch.ones(4, 1))])
    assert resume(S.AFTER_VALIDATION, between, hooks=all_hooks, loader=loader, num_epochs=3, validation=plan) == []


def test_a_loader_that_cannot_be_told_its_place_is_refused(make_strategy, make_loader, tmp_path):
    """A checkpoint of a run whose loader kept its place needs such a loader; the message names what came instead."""
    strategy = make_strategy(num_steps=4)
    strategy.run(Stream())
    save_training(tmp_path, strategy)
    resumed = make_strategy(num_steps=4)
    load_training(tmp_path, resumed)
    with pytest.raises(ValueError, match=r"the place that its loader kept, but this loader \(list\) has no"):
        resumed.run(list(make_loader()))


def test_workers_that_load_ahead_change_nothing(make_strategy, make_loader, tmp_path, differences):
    """With worker processes, which are ahead of the training, the pass goes on with the very next batch."""
    straight = make_strategy(num_steps=9)
    straight.run(make_loader(num_workers=1))
    first = make_strategy(num_steps=4)
    first.run(make_loader(num_workers=1))
    save_training(tmp_path, first)
    rest = make_strategy(num_steps=5)
    load_training(tmp_path, rest)
    rest.run(make_loader(num_workers=1))
    assert differences(straight.state_dict()["models"], rest.state_dict()["models"]) == []


@pytest.mark.parametrize("batch", [4, 6, 8, 12])
@pytest.mark.parametrize("own_seed", [None, 5])
def test_workers_that_stay_change_nothing(resume, make_loader, all_hooks, batch, own_seed):
    """Workers that stay draw a seed in the first pass alone; a run that goes on in a later pass draws none either."""
    loader = lambda own_seed: make_loader(own_seed, num_workers=1, persistent_workers=True)  # noqa: E731 - used once
    at = lambda ctx: ctx.batch_count == batch  # noqa: E731 - two words, used once
    assert resume(S.AFTER_BATCH, at, hooks=all_hooks, loader=loader, own_seed=own_seed, num_epochs=3) == []


def test_workers_that_stay_change_nothing_between_passes(resume, make_loader, all_hooks):
    """The same where the run was saved at the end of a pass, or after it."""
    loader = lambda own_seed: make_loader(own_seed, num_workers=1, persistent_workers=True)  # noqa: E731 - used once
    at = lambda ctx: ctx.epoch_step_count == 6  # noqa: E731 - used once
    assert resume(S.AFTER_EPOCH, at, hooks=all_hooks, loader=loader, num_epochs=3) == []


def test_validation_draws_no_random_number_of_the_run(make_strategy, make_loader, differences, kinds):
    """How often a run is validated, and by which loader, does not change what is trained."""
    plain = make_strategy(kinds["Jitter"]())
    plain.run(make_loader())
    often = make_strategy(kinds["Jitter"](), validation=Validation(loader=make_loader(num_workers=1), every_steps=1))
    often.run(make_loader())
    assert differences(plain.state_dict()["models"], often.state_dict()["models"]) == []


def test_a_generator_of_the_validation_loader_is_found_again(resume, make_loader, all_hooks):
    """A validation loader that draws from its own generator gives the same results after a resume."""
    options = lambda: {  # noqa: E731 - used once
        "validation": Validation(loader=make_loader(9), every_steps=2),
        "optimizer_configs": OptimizerConfig(scheduler_cls="ReduceLROnPlateau", scheduler_kwargs={"patience": 0}),
    }
    at = lambda ctx: ctx.batch_count == 7  # noqa: E731 - two words, used once
    assert resume(S.AFTER_BATCH, at, hooks=all_hooks, options=options, num_epochs=3) == []


def test_before_the_first_step(make_strategy, make_loader, tmp_path, differences, reseed):
    """A run that was saved before it began equals itself, with whatever SETUP and BEFORE_TRAINING draw."""
    draw = lambda ctx, stage: torch.rand(3)  # noqa: E731 - two words, used twice

    def make():
        from_setup = Drawing(S.SETUP, draw)
        return make_strategy(from_setup, Drawing(S.BEFORE_TRAINING, draw))

    class Drawing:
        frequency = 1

        def __init__(self, stage, act):
            self.stage, self.act = stage, act

        def __call__(self, ctx, stage):
            self.act(ctx, stage)

    straight = make()
    save_training(tmp_path, straight)
    straight.run(make_loader())
    resumed = make()
    reseed(99)
    load_training(tmp_path, resumed)
    resumed.run(make_loader())
    assert differences(straight.state_dict(), resumed.state_dict()) == []


def test_saving_disturbs_nothing(make_strategy, make_loader, tmp_path, differences, kinds):
    """A run that is saved after every batch equals one that is never saved: no random number is drawn."""
    save = kinds["Plain"](lambda ctx, stage: save_training(tmp_path, ctx.workflow))
    nothing = kinds["Plain"](lambda ctx, stage: None)
    saved, silent = make_strategy(kinds["Jitter"](), save), make_strategy(kinds["Jitter"](), nothing)
    silent.run(make_loader())
    torch_state = torch.get_rng_state()
    make_strategy()  # seeds again
    saved.run(make_loader())
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert differences(saved.state_dict(), silent.state_dict()) == []


def test_saving_builds_no_model(make_strategy, make_loader, tmp_path, monkeypatch):
    """Not one module is made while a run is saved."""
    strategy = make_strategy()
    strategy.run(make_loader())
    made = []
    monkeypatch.setattr(nn.Module, "__init__", lambda self, *args, **kwargs: made.append(type(self)))
    save_training(tmp_path, strategy)
    assert made == []


def test_state_taken_is_state_kept(make_strategy, make_loader, differences):
    """Later steps change neither a state nor a snapshot that was taken."""
    strategy = make_strategy()
    batches = list(make_loader())
    strategy.train_batch(batches[0])
    state, snapshot = strategy.state_dict(), take_snapshot(strategy)
    kept = copy.deepcopy(state)
    before = copy.deepcopy(snapshot.sections)
    strategy.train_batch(batches[1])
    assert differences(state, kept) == []
    assert differences(dict(snapshot.sections), dict(before)) == []
    assert differences(strategy.state_dict(), kept)


def test_training_does_not_change_a_state_that_was_loaded(make_strategy, make_loader, differences):
    """A state in memory can be loaded into several runs: none of them trains on its tensors."""
    first, second = make_strategy(), make_strategy()
    first.run(make_loader())
    state = first.state_dict()
    kept = copy.deepcopy(state)
    second.load_state_dict(state)
    second.run(make_loader())
    assert differences(state, kept) == []


def test_a_state_cannot_be_taken_inside_a_batch(make_strategy, make_loader, kinds):
    """Before AFTER_BATCH it is a RuntimeError that says when to ask."""
    hook = kinds["Plain"](lambda ctx, stage: ctx.workflow.state_dict(), S.AFTER_OPTIMIZER_STEP)
    with pytest.raises(RuntimeError, match="in the middle of a batch.*AFTER_BATCH"):
        make_strategy(hook).run(make_loader())


def test_a_run_can_be_saved_after_an_error(make_strategy, make_loader, kinds, differences):
    """An exception in a batch does not leave the run unsavable, but a warning says that it will not be the same."""

    def fail(ctx, stage):
        raise KeyboardInterrupt

    strategy = make_strategy(kinds["Plain"](fail, S.AFTER_FORWARD))
    with pytest.raises(KeyboardInterrupt):
        strategy.run(make_loader())
    other = make_strategy(kinds["Plain"](lambda ctx, stage: None, S.AFTER_FORWARD))
    with pytest.warns(CheckpointWarning, match="left in its middle by an error"):
        state = strategy.state_dict()
    other.load_state_dict(state)
    assert differences(state["models"], other.state_dict()["models"]) == []
    strategy = make_strategy(hooks=[], num_steps=4)
    strategy.run(make_loader())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy.state_dict()


def test_hooks_that_run_now_and_then_are_not_called_twice_at_one_step(make_strategy, make_loader, kinds):
    """A hook with frequency 2 that ran at a step does not run there again after a resume, though a step was vetoed."""

    def make(log):
        every_two = kinds["Plain"](lambda ctx, stage: log.append(ctx.batch_count), frequency=2)
        return make_strategy(every_two, kinds["VetoAt"](2, 3))

    straight, first, rest = [], [], []
    batches = list(make_loader())
    strategy = make(straight)
    for batch in batches:
        strategy.train_batch(batch)
    strategy = make(first)
    for batch in batches[:3]:
        strategy.train_batch(batch)
    resumed = make(rest)
    resumed.load_state_dict(strategy.state_dict())
    for batch in batches[3:]:
        resumed.train_batch(batch)
    assert first + rest == straight


def test_state_of_a_higher_precision_than_the_weights_stays_exact(make_strategy, make_loader):
    """An optimizer that keeps fp32 state for bf16 weights gets fp32 state back, although torch would round it."""

    class KeepsFloat32(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    state["sum"] = state.get("sum", torch.zeros_like(p, dtype=torch.float32)) + p.grad.float() / 3

    options = {
        "models": nn.Linear(6, 1).bfloat16(),
        "optimizer_configs": OptimizerConfig(optimizer_cls=KeepsFloat32, optimizer_kwargs={"lr": 0.1}),
        "training_fn": lambda model, batch: model(batch[0].bfloat16()),
    }
    strategy, other = make_strategy(**options), make_strategy(**{**options, "models": nn.Linear(6, 1).bfloat16()})
    strategy.train_batch(next(iter(make_loader())))
    other.load_state_dict(strategy.state_dict())
    [one], [two] = strategy.optimizers, other.optimizers
    for a, b in zip(one.state.values(), two.state.values(), strict=True):
        assert b["sum"].dtype is torch.float32
        assert torch.equal(a["sum"], b["sum"])


def test_compiled_and_bare_models_share_their_names(make_strategy, make_loader):
    """A state of a run on torch.compile loads into one without it, and the other way round."""
    compiled = make_strategy(models=torch.compile(nn.Linear(6, 1), backend="eager"))
    bare = make_strategy(models=nn.Linear(6, 1))
    compiled.run(make_loader())
    assert set(compiled.state_dict()["models"]["main"]) == {"weight", "bias"}
    bare.load_state_dict(compiled.state_dict())
    compiled.load_state_dict(bare.state_dict())


def test_a_longer_run_goes_on_from_a_shorter_one(make_strategy, make_loader, tmp_path, kinds, differences):
    """A run of 4 steps that saved at its last one, loaded into a run of 9, ends after 9 as if it had been one."""
    save = kinds["Plain"](lambda ctx, stage: ctx.step_count == 4 and save_training(tmp_path, ctx.workflow))
    make_strategy(save, num_steps=4).run(make_loader())
    straight, longer = make_strategy(num_steps=9, hooks=[]), make_strategy(num_steps=9, hooks=[])
    make_strategy()  # seeds again
    straight.run(make_loader())
    load_training(tmp_path, longer)
    longer.run(make_loader())
    assert longer.step_count == 9
    assert differences(straight.state_dict()["models"], longer.state_dict()["models"]) == []


def test_loading_a_run_that_was_over_trains_nothing(make_strategy, make_loader, tmp_path, kinds):
    """A run saved at its last step, loaded into one of the same length, is over: no batch is trained on."""
    save = kinds["Plain"](lambda ctx, stage: ctx.step_count == 4 and save_training(tmp_path, ctx.workflow))
    make_strategy(save, num_steps=4).run(make_loader())
    again = make_strategy(num_steps=4, hooks=[])
    load_training(tmp_path, again)
    again.run(make_loader())
    assert (again.step_count, again.batch_count) == (4, 4)


def test_less_data_than_before_is_refused(make_strategy, make_loader, tmp_path):
    """A loader that ends before the place of the checkpoint is a ValueError with both numbers."""
    strategy = make_strategy(num_steps=4)
    strategy.run(make_loader())
    save_training(tmp_path, strategy)
    resumed = make_strategy()
    load_training(tmp_path, resumed)
    with pytest.raises(ValueError, match=r"\(list\) gave 2 batches, but the checkpoint was saved after 4 of this pass"):
        resumed.run(list(make_loader())[:2])


def test_a_pass_without_a_step_is_still_found_after_a_resume(make_strategy, make_loader, kinds, tmp_path):
    """Progress is judged over the whole pass: one that stepped before the stop is fine, one that never did is not."""
    strategy = make_strategy(kinds["VetoAt"](*range(2, 6)), num_steps=2)
    strategy.run(make_loader())
    save_training(tmp_path, strategy)
    resumed = make_strategy(kinds["VetoAt"](*range(2, 6)), num_steps=3)
    load_training(tmp_path, resumed)
    resumed.run(make_loader())
    assert resumed.step_count == 5
