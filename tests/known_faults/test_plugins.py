"""Entries 37 to 45: how plugins are found, what hooks keep and leave behind, and in which order they act."""

from __future__ import annotations

import collections
import enum
import itertools
import multiprocessing
import pathlib
import pickle
import re
import runpy
import textwrap
import warnings
import weakref

import pytest
import torch
from torch import nn

from nvalchemi.errors import PluginWarning
from nvalchemi.hooks import TrainContext, activate_hooks, list_hooks
from nvalchemi.testing import FailingHook, TinyModel, VetoingHook, tiny_batches
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook, TrainingUpdateOrchestrator

IN_A_BATCH = list(TrainingStage)[list(TrainingStage).index(TrainingStage.BEFORE_BATCH) :][:12]  # to AFTER_BATCH
SPAWNED = str(pathlib.Path(__file__).with_name("spawned.py"))
OFFER = """
from nvalchemi.hooks import HookOffer, hookimpl

class Made:
    frequency = 1
    stage = None

    def __call__(self, ctx, stage):
        pass

    def _runs_on_stage(self, stage):
        return stage.name == "AFTER_BATCH"

@hookimpl
def nvalchemi_hooks():
"""
BROKEN = {
    "ImportError": "import a_module_that_is_not_there",
    "SyntaxError": "def broken(:",
    "in registration": OFFER + "    raise KeyError('in registration')",
    "half done": OFFER
    + "    yield HookOffer('m', Made, default_kwargs={})\n    raise KeyError('after the first offer')",
}


@pytest.mark.fault(
    ours="Discovery", naive="LoadsAllAtOnce", raises=ModuleNotFoundError, shows="a_module_that_is_not_there"
)
@pytest.mark.parametrize("source", BROKEN.values(), ids=BROKEN)
def test_a37_a_broken_plugin_stops_nobody_else(way, site, source):
    """Of three plugins the middle one fails, at import or later: the others work, and one warning names it."""
    site.add_plugin("a-hooks", ["a"], default_kwargs={})
    site.add("m-hooks", "3.1", hooks={"m": "m_hooks.plugin"}, modules={"m_hooks.plugin": source})
    site.add_plugin("z-hooks", ["z"], default_kwargs={})
    with warnings.catch_warnings(record=True, action="always") as caught:
        names = way.activate()
    assert names == ["a", "z"]
    [warning] = caught
    assert warning.category is PluginWarning
    assert re.search(r"m-hooks 3\.1.*NVALCHEMI_HOOKS_DISABLE=m", str(warning.message))


def test_a37_a_broken_plugin_can_be_switched_off(ours, site, monkeypatch):
    """Switched off by name, a broken plugin is not imported, and nothing warns."""
    site.add_plugin("a-hooks", ["a"], default_kwargs={})
    site.add("m-hooks", "3.1", hooks={"m": "m_hooks.plugin"}, modules={"m_hooks.plugin": "1 / 0"})
    monkeypatch.setenv("NVALCHEMI_HOOKS_DISABLE", "m")
    assert [one.name for one in activate_hooks("auto")] == ["a"]


@pytest.mark.fault(ours="Discovery", naive="ReadsEveryFolder", shows="['acme', 'acme'] == ['acme']")
def test_a38_a_plugin_with_two_metadata_folders_is_there_once(way, site):
    """An egg-info that an editable installation left beside the dist-info adds nothing."""
    site.add_plugin("acme-hooks", ["acme"], default_kwargs={})
    site.add("acme-hooks", hooks={"acme": "acme_hooks.plugin"}, egg_info=True)
    assert way.activate() == ["acme"]


@pytest.mark.fault(ours="Discovery", naive="KeepsTheFirstOfAName", raises=pytest.fail.Exception, shows="DID NOT RAISE")
def test_a38_a_name_with_two_owners_names_both(way, site):
    """Of two distributions that offer a name none is taken by itself: the error has both, and how to choose."""
    site.add_plugin("one-hooks", ["ema"], default_kwargs={})
    site.add_plugin("two-hooks", ["ema"], default_kwargs={})
    with pytest.raises(LookupError, match=r"one-hooks.*two-hooks"):
        way.one("ema")
    assert [hook.name for hook in list_hooks()] == ["ema", "ema"]


@pytest.mark.fault(ours="Discovery", naive="LoadsEveryVersion", raises=TypeError, shows="unexpected keyword argument")
def test_a39_a_plugin_for_another_core_is_left_out_and_named(way, site):
    """A plugin made for other versions of the core is not imported; the warning has its range and our version."""
    source = OFFER + "    return [HookOffer('old', Made, gone=True)]"
    site.add(
        "old-hooks", "1.0", hooks={"old": "old_hooks.plugin"}, modules={"old_hooks.plugin": source},
        requires=["nvalchemi-hooks<2"],
    )  # fmt: skip
    site.add("nvalchemi-hooks", "2.0")
    site.add_plugin("z-hooks", ["z"], default_kwargs={})
    with warnings.catch_warnings(record=True, action="always") as caught:
        names = way.activate()
    assert names == ["z"]
    [warning] = caught
    assert re.search(r"old-hooks.*<2.*2\.0 is installed", str(warning.message))


@pytest.mark.fault(ours="Discovery", naive="AsksTheDiskEachTime", shows="1 3 True")
def test_a40_installed_packages_are_looked_through_once_and_late(way, site):
    """Importing looks at nothing; two strategies look once; a plugin that no strategy names is never imported."""
    site.add_plugin("acme-hooks", ["acme"])
    site.add_plugin("other-hooks", ["other"])
    site.write_module("acme_hooks.plugin", OFFER + "    return [HookOffer('acme', Made)]")
    done = site.run("-c", textwrap.dedent(way.program))
    assert done.stdout.strip() == "0 1 False", done.stderr


class Tiny(TinyModel):
    """The tiny model; its batches carry the target along."""

    def forward(self, batch):
        return super().forward(batch[0])


def square_error(predictions, batch):
    """The loss of the tiny model."""
    return (predictions - batch[1]).square().mean()


@pytest.mark.fault(
    naive="HoldsAFunctionOfAFunction",
    raises=(AttributeError, pickle.PicklingError),
    shows="local object",
    careful=False,
)
@pytest.mark.parametrize("steps", [0, 3], ids=["before training", "after 3 steps"])
def test_a41_every_hook_pickles(way, steps):
    """A pickle of all update hooks holds their whole state, before training and after."""
    torch.manual_seed(0)
    run = way(
        TinyModel(),
        loss=square_error,
        ema={"decay": 0.9},
        clip={},
        scale={"init_scale": 8.0},
        check=True,
        options={"lr": 0.1},
        training_fn=lambda model, batch: model(batch[0]),
    )
    for batch in tiny_batches(steps):
        run.step(batch)
    copied = pickle.loads(run.pickled())
    assert str(copied.state_dict()) == str(run.strategy.orchestrator.state_dict())


def test_a41_a_spawned_process_goes_on_with_the_same_numbers(need, tmp_path):
    """Model, optimizer and hooks, pickled after three steps, go on in a spawned process bit for bit as they do here."""
    need("ema", "grad-clip", "loss-scaling", "scaler-veto")
    go_on = runpy.run_path(SPAWNED)["go_on"]
    torch.manual_seed(0)
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    named = ["ema", "grad_clip", {"loss_scaling": {"init_scale": 8.0}}, "scaler_veto"]
    update = TrainingUpdateOrchestrator(*(one.hook for one in activate_hooks(named)))
    steps = go_on(model, optimizer, update, tiny_batches(6, poisoned={1: torch.inf})[:3], 0)
    (tmp_path / "pickled").write_bytes(pickle.dumps((model, optimizer, update, steps)))
    worker = multiprocessing.get_context("spawn").Process(
        target=runpy.run_path, args=(SPAWNED, {"folder": tmp_path}, "__main__")
    )
    worker.start()
    go_on(model, optimizer, update, tiny_batches(6)[3:], steps)
    worker.join(60)
    assert worker.exitcode == 0
    result = torch.load(tmp_path / "result", weights_only=True)
    assert str(result) == str({"weights": model.state_dict(), "hooks": update.state_dict()})


class Colour(enum.Enum):
    """Something that is not plain data."""

    RED = 1


class Remembers(TrainingUpdateHook):
    """A hook whose state is whatever it is given."""

    reads_grad = False

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def numpy_scalar():
    """A number that looks like any other."""
    return pytest.importorskip("numpy").float64(0.5)


@pytest.mark.fault(naive="SavesWhateverHooksHold", raises=pytest.fail.Exception, shows="DID NOT RAISE", careful=False)
@pytest.mark.parametrize(
    "make",
    [numpy_scalar, lambda: Colour.RED, lambda: pathlib.Path("x"), lambda: collections.defaultdict(int)],
    ids=["numpy scalar", "Enum", "Path", "defaultdict"],
)
def test_a42_a_state_that_could_not_be_loaded_is_refused_when_it_is_saved(way, point, tmp_path, make):
    """What safe loading would refuse is refused at the save, with the name of the hook and the place in its state."""
    run = way(point(w=1.0), hooks=[Remembers(make())])
    run.step({"w": 1.0})
    with pytest.raises(TypeError, match=r"remembers.*value"):
        run.save(tmp_path / "saved")


def test_a42_a_checkpoint_with_all_hooks_loads_safely(ours, tmp_path):
    """Every file of a checkpoint, taken after three steps with all plugins, loads with weights_only."""
    run = ours(Tiny(), loss=square_error, ema={}, clip={}, scale={}, check=True, scheduler=True, options={"lr": 0.1})
    for batch in tiny_batches(3):
        run.step(batch)
    run.save(tmp_path / "saved")
    files = list((tmp_path / "saved").rglob("*.pt"))
    assert len(files) >= 8
    for file in files:
        torch.load(file, weights_only=True)


class Fails(nn.Module):
    """A linear layer that says in which dtype it ran, and raises once, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.failing = True

    def forward(self, x):
        self.dtype = (y := self.layer(x)).dtype
        if self.failing:
            self.failing = False
            raise ZeroDivisionError("in the forward pass")
        return y.float().sum()


@pytest.mark.fault(naive="EntersAutocastByHand", shows="True is False")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a43_an_exception_in_the_forward_pass_closes_autocast(way, precision):
    """After a batch that raised nothing is cast any more, and the next batch trains."""
    model = Fails()
    run = way(model, precision=precision)
    with pytest.raises(ZeroDivisionError):
        run.step(torch.ones(1, 1))
    assert torch.is_autocast_enabled("cpu") is False
    assert model.layer(torch.ones(1, 1)).dtype is torch.float32
    run.step(torch.ones(1, 1))
    assert model.dtype is not torch.float32


@pytest.mark.parametrize("stage", IN_A_BATCH)
def test_a43_an_exception_at_any_stage_closes_autocast(ours, stage):
    """Whatever raises in a batch, before the hook that casts or after it, the state of autocast is as before."""
    model = Fails()
    model.failing = False

    class Raises(TrainingUpdateHook):
        reads_grad = False
        priority = 90
        armed = True

        def __call__(self, ctx, at, will_skip=False):
            if self.armed and at is stage:
                self.armed = False
                raise ZeroDivisionError
            return True, ctx.loss

    owned = stage in (TrainingStage.DO_BACKWARD, TrainingStage.DO_OPTIMIZER_STEP)
    failing = Raises() if owned else FailingHook(ZeroDivisionError(), stage=stage)
    run = ours(model, precision="bf16", hooks=[failing])
    with pytest.raises(ZeroDivisionError):
        run.step(torch.ones(1, 1))
    assert torch.is_autocast_enabled("cpu") is False
    run.step(torch.ones(1, 1))
    assert model.dtype is torch.bfloat16
    assert torch.is_autocast_enabled("cpu") is False


def test_a43_a_context_that_cannot_be_entered_closes_those_before_it(ours, point):
    """Of two contexts the second fails when it is entered: the first is closed, though no hook closes it."""

    class Two(TrainingUpdateHook):
        reads_grad = False

        def before_batch(self, ctx, *, will_skip):
            ctx.enter_batch_context(torch.autocast("cpu", torch.bfloat16))
            ctx.enter_batch_context(self)
            return True

        def __enter__(self):
            if torch.is_autocast_enabled("cpu"):
                raise ZeroDivisionError
            return self

        def __exit__(self, *error):
            pass

    run = ours(point(w=1.0), hooks=[Two()])
    with pytest.raises(ZeroDivisionError):
        run.step({"w": 1.0})
    assert torch.is_autocast_enabled("cpu") is False


class Token:
    """Lives as long as the graph that holds it."""


class Holding(torch.autograd.Function):
    """Saves a token in the graph."""

    @staticmethod
    def forward(ctx, x, token):
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Watched(nn.Module):
    """A weight, and weak references to what the graph of each batch holds."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.graphs = []

    def forward(self, gradient):
        token = Token()
        self.graphs.append(weakref.ref(token))
        return Holding.apply(self.w * gradient, token)

    @property
    def alive(self) -> int:
        return sum(graph() is not None for graph in self.graphs)


@pytest.mark.fault(naive="KeepsLosses", shows="2 == 0")
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("veto", [(), (0, 1)], ids=["stepped", "vetoed"])
def test_a44_no_graph_outlives_its_batch(way, veto, lazy):
    """After a batch, stepped or vetoed, nothing holds its graph, and the loss that is left has none."""
    model = Watched()
    run = way(model, veto=veto, lazy=lazy)
    kept = [run.step(torch.tensor(1.0)) for _ in range(2)]
    assert model.alive == 0
    assert [one.loss.grad_fn for one in kept] == [None, None]


@pytest.mark.parametrize(
    "stage", [TrainingStage.AFTER_LOSS, TrainingStage.AFTER_BACKWARD, TrainingStage.AFTER_OPTIMIZER_STEP]
)
def test_a44_no_graph_outlives_a_batch_that_raised(ours, stage):
    """An exception may hold frames, and the context in them, but not the graph of the batch."""
    model, contexts = Watched(), []

    class Keeps:
        frequency = 1
        stage = TrainingStage.BEFORE_FORWARD

        def __call__(self, ctx, stage):
            contexts.append(ctx)

    run = ours(model, hooks=[Keeps(), FailingHook(ZeroDivisionError(), stage=stage)])
    with pytest.raises(ZeroDivisionError):
        run.step(torch.tensor(1.0))
    assert contexts[0].loss.grad_fn is None
    run.step(torch.tensor(1.0))
    assert model.alive == 0


def ranked(label, priority):
    """An update hook with a label and a priority."""
    hook = VetoingHook(-1, priority=priority)
    return hook.labelled(label)


@pytest.mark.fault(naive="KeepsTheOrderOfRegistration", shows="118 == 0", careful=False)
def test_a45_the_order_of_hooks_is_that_of_their_priorities(way):
    """Five hooks, two of equal priority, in all 120 orders: priorities decide, and equals keep their order."""
    hooks = [ranked("a", 10), ranked("b", 20), ranked("c", 30), ranked("d", 30), ranked("e", 40)]
    wrong = 0
    for given in itertools.permutations(hooks):
        expected = sorted(given, key=lambda hook: hook.priority)  # a sort that keeps the order of equals
        wrong += [hook.label for hook in way.order(given)] != [hook.label for hook in expected]
    assert wrong == 0


def test_a45_hooks_by_name_and_hooks_of_ones_own_share_one_order(ours, site):
    """Plugins come in the order of their names, whatever the disk says, and among hooks of one's own by priority."""
    for name in ("b", "a", "c"):
        site.add_plugin(f"{name}-hooks", [name], default_kwargs={})
    site.order = lambda found: list(reversed(list(found)))
    assert [one.name for one in activate_hooks("auto")] == ["a", "b", "c"]
    called = []

    class Calls(TrainingUpdateHook):
        reads_grad = False

        def __init__(self, label, priority):
            self.labelled(label)
            self.priority = priority

        def before_batch(self, ctx, *, will_skip):
            called.append(self.label)
            return True

    update = TrainingUpdateOrchestrator(Calls("late", 60), Calls("early", 1), Calls("middle", 50))
    update(TrainContext(), TrainingStage.BEFORE_BATCH)
    assert called == ["early", "middle", "late"]


@pytest.mark.fault(naive="SavesBeforeTheAverage", shows="(1.0, 0.0) == (1.0, 0.5)")
@pytest.mark.parametrize("turned", [False, True], ids=["average first", "checkpoint first"])
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_a45_a_checkpoint_of_a_step_holds_the_average_of_that_step(way, point, tmp_path, turned, lazy):
    """Saved at every step, the average has followed the step already, in whatever order the hooks were given.

    Live 0, then 1, decay 0.5: the average is 0, then 0.5.
    """
    run = way(point(w=0.0), ema={"decay": 0.5}, checkpoints=tmp_path / "kept", turned=turned, lazy=lazy)
    for gradient in (0.0, -1.0):
        run.step({"w": gradient})
        run.finish()
    resumed = way(point(w=9.0), ema={"decay": 0.5}, checkpoints=tmp_path / "kept", lazy=lazy)
    resumed.load(tmp_path / "kept")
    assert (resumed.live.w.item(), resumed.average_of("w")) == (1.0, 0.5)


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_a44_no_graph_outlives_its_batch_in_an_open_window(ours, lazy):
    """While gradients are kept from batch to batch, graphs are not."""
    model = Watched()
    run = ours(model, accumulate={"steps": 3}, lazy=lazy)
    for _ in range(4):
        run.step(torch.tensor(1.0))
        assert model.alive == 0


@pytest.mark.parametrize("value", [Colour.RED, pathlib.Path("x")], ids=["Enum", "Path"])
def test_a42_the_state_of_a_plain_hook_is_checked_too(ours, point, tmp_path, value):
    """A hook that takes no part in the update is refused by its name as well."""

    class Logs:
        frequency = 1
        stage = TrainingStage.AFTER_BATCH

        def __call__(self, ctx, stage):
            pass

        def state_dict(self):
            return {"value": [value]}

        def load_state_dict(self, state):
            pass

    run = ours(point(w=1.0), hooks=[Logs()])
    run.step({"w": 1.0})
    with pytest.raises(TypeError, match=r"(?i)logs.*value"):
        run.save(tmp_path / "saved")
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
def test_a41_hooks_pickle_in_the_middle_of_a_window(point, ours, lazy):
    """A pickle that is taken between two micro-batches has the whole state, a step that is pending included."""
    run = ours(point(w=1.0), ema={"decay": 0.5}, accumulate={"steps": 2}, scale={"init_scale": 8.0}, lazy=lazy)
    for _ in range(3):
        run.step({"w": 1.0})
    copied = pickle.loads(run.pickled())
    assert str(copied.state_dict()) == str(run.strategy.orchestrator.state_dict())
