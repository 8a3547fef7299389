"""How the averaged model comes to be, and what is refused."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from nvalchemi.training import TrainingStage
from nvalchemi_hooks_ema import EMAHook


class KeepsOutput(nn.Module):
    """Stores its last output, deep inside a container, as loggers like to do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.kept = {"outputs": []}

    def forward(self, x):
        self.kept["outputs"].append(self.layer(x))
        return self.kept["outputs"][-1]


class Stubborn:
    """Refuses to be copied."""

    def __deepcopy__(self, memo):
        raise TypeError("I am one of a kind")


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(nn.Linear(2, 2))


def test_it_is_built_at_setup(context):
    """After SETUP there is an AveragedModel with the weights of the model, and nothing is counted."""
    model = nn.Linear(2, 1)
    hook = EMAHook()
    hook(context(model), TrainingStage.SETUP)
    averaged = hook.get_averaged_model()
    assert isinstance(averaged, AveragedModel)
    assert torch.equal(averaged.module.weight, model.weight)
    assert (hook.num_updates, int(averaged.n_averaged)) == (0, 0)


def test_without_setup_it_is_built_at_the_first_eligible_step(follow):
    """A loop that never dispatches SETUP gets its average at the first step that counts."""
    model, hook = nn.Linear(2, 1), EMAHook(start_step=2)
    follow(hook, model, 0)
    with pytest.raises(RuntimeError, match=r"no averaged model of 'main' yet.*start_step=2"):
        hook.get_averaged_model()
    follow(hook, model, 1)
    assert torch.equal(hook.get_averaged_model().module.weight, model.weight)


def test_a_second_setup_keeps_the_average(primed, context, fill):
    """SETUP before a second run overwrites nothing."""
    model = nn.Linear(2, 1)
    hook = primed(model, 1.0)
    averaged = hook.get_averaged_model()
    fill(model, 5.0)
    hook(context(model), TrainingStage.SETUP)
    assert hook.get_averaged_model() is averaged
    assert averaged.module.weight.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("stage", [TrainingStage.SETUP, TrainingStage.AFTER_OPTIMIZER_STEP])
def test_a_missing_model_is_named_with_those_there_are(stage, context):
    """A model key that does not exist is a KeyError with the key and the existing keys."""
    hook = EMAHook(model_key="student")
    with pytest.raises(KeyError, match=r"'student'.*\['main', 'teacher'\]"):
        hook(context(nn.Linear(1, 1), teacher=nn.Linear(1, 1)), stage, False)


def test_another_model_than_the_main_one_can_be_averaged(context):
    """The model key chooses among several models."""
    teacher = nn.Linear(3, 1)
    hook = EMAHook(model_key="teacher")
    hook(context(nn.Linear(1, 1), teacher=teacher), TrainingStage.SETUP)
    assert hook.get_averaged_model().module.weight.shape == (1, 3)


def test_modify_ema_methods_is_called_once_on_the_copy(context):
    """A module that adapts itself to being an average is told once, right after construction; the live one never."""

    class Adapts(nn.Linear):
        calls = 0

        def modify_ema_methods(self):
            assert self.training  # before anything else was done to the copy
            self.calls += 1

    model, hook = Adapts(1, 1), EMAHook()
    ctx = context(model)
    hook(ctx, TrainingStage.SETUP)
    hook(ctx, TrainingStage.SETUP)
    hook(ctx, TrainingStage.AFTER_OPTIMIZER_STEP, False)
    hook.load_state_dict(hook.state_dict())
    assert (hook.get_averaged_model().module.calls, model.calls) == (1, 0)


def test_the_copy_can_be_supplied(context, fill, follow):
    """An overridden builder gets the bare model, and what it returns is what is averaged."""

    class Supplied(EMAHook):
        def _build_averaged_model(self, source: nn.Module) -> AveragedModel:
            assert isinstance(source, nn.Linear)
            return AveragedModel(copy.deepcopy(source), use_buffers=False)

    model = nn.Linear(1, 1)
    hook = Supplied(decay=0.75)
    hook(context(nn.DataParallel(model)), TrainingStage.SETUP)
    for step, value in enumerate((0.0, 4.0)):
        fill(model, value)
        follow(hook, model, step)
    assert hook.get_averaged_model().module.weight.item() == 1.0
    assert Supplied().name == "supplied"


def test_a_supplied_copy_of_another_kind_is_refused(context):
    """A builder that returns a bare module is named, with what it should return."""

    class Wrong(EMAHook):
        def _build_averaged_model(self, source: nn.Module) -> AveragedModel:
            return copy.deepcopy(source)

    with pytest.raises(TypeError, match=r"Wrong\._build_averaged_model returned a Linear; return .*AveragedModel"):
        Wrong().setup(context(nn.Linear(1, 1)))


def test_a_supplied_copy_that_shares_storage_is_separated(context, fill, follow):
    """A builder that returns the live model itself, in effect, does not make the hook change the live weights."""

    class Shares(EMAHook):
        def _build_averaged_model(self, source: nn.Module) -> AveragedModel:
            averaged = AveragedModel(source)
            averaged.module.weight.data = source.weight.data
            return averaged

    model = nn.Linear(1, 1)
    hook = Shares(decay=0.5)
    hook.setup(context(model))
    for step, value in enumerate((0.0, 4.0)):
        fill(model, value)
        follow(hook, model, step)
    assert (model.weight.item(), hook.get_averaged_model().module.weight.item()) == (4.0, 2.0)


@pytest.mark.parametrize(
    "build", [old_weight_norm, lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), KeepsOutput]
)
def test_a_model_that_holds_tensors_with_a_graph_is_copied(build, context, follow, perturb):
    """Old and new weight norm, and a module that caches activations, can be averaged, and the average computes."""
    torch.manual_seed(0)
    model, x = build(), torch.ones(1, 2)
    model(x)
    hook = EMAHook(decay=0.5)
    hook.setup(context(model))
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(2):
        perturb(model, step)
        follow(hook, model, step)
        for name, parameter in model.named_parameters():
            plain[name] = torch.lerp(plain[name], parameter.detach(), 0.5) if step else parameter.detach().clone()
    averaged = hook.get_averaged_model()
    assert all(torch.equal(p, plain[name]) for name, p in averaged.module.named_parameters())
    reference = build()
    reference.load_state_dict(averaged.module.state_dict())
    assert torch.equal(averaged(x), reference(x))
    model(x).sum().backward()  # the live model still trains


def test_what_cannot_be_copied_is_named_before_training(context):
    """A model whose attribute refuses a copy fails at SETUP, with the attribute's path and the way out."""
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    model[1].unique = Stubborn()
    hook = EMAHook()
    with pytest.raises(RuntimeError, match=r"'1\.unique' refuses .*one of a kind.*_build_averaged_model") as caught:
        hook.setup(context(model))
    assert isinstance(caught.value.__cause__, TypeError)
    with pytest.raises(RuntimeError, match="no averaged model"):
        hook.get_averaged_model()


def test_a_module_that_refuses_to_be_copied_is_named(context):
    """A module class that forbids its copy, as sharded ones do, is named by its path."""

    class Sharded(Stubborn, nn.Linear):
        pass

    with pytest.raises(RuntimeError, match=r"the module '0' refuses a deep copy"):
        EMAHook().setup(context(nn.Sequential(Sharded(1, 1))))


def test_a_model_without_parameters_is_refused(context):
    """An average that could never touch a parameter is an error."""
    with pytest.raises(ValueError, match="nothing to average: the model ReLU has no parameters"):
        EMAHook().setup(context(nn.ReLU()))


def test_a_lazy_parameter_is_named(context):
    """A model whose shapes are not known yet is refused at SETUP, with the remedy."""
    with pytest.raises(ValueError, match=r"'0\.weight'.*lazy.*Call the model once"):
        EMAHook().setup(context(nn.Sequential(nn.LazyLinear(1))))


def test_other_shapes_are_named(primed, follow):
    """A live parameter of another shape is an error that names it with both shapes, and the average stays."""
    model = nn.Linear(2, 1)
    hook = primed(model, 1.0)
    model.weight = nn.Parameter(torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"'weight'.*\(1, 3\).*\(1, 2\)"):
        follow(hook, model, 1)
    assert hook.get_averaged_model().module.weight.tolist() == [[1.0, 1.0]]
    assert hook.num_updates == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.register_parameter("extra", nn.Parameter(torch.zeros(1))), "has 'extra' besides"),
        (lambda model: model.add_module("adapter", nn.Linear(1, 1)), r"has 'adapter\.bias', 'adapter\.weight' besides"),
        (lambda model: delattr(model, "bias"), "lacks 'bias'"),
        (lambda model: setattr(model, "bias", None), "lacks 'bias'"),
    ],
)
def test_other_names_are_named(change, message, primed, follow):
    """A parameter or a child that came or went after SETUP is an error that names it."""
    model = nn.Linear(2, 1)
    hook = primed(model, 1.0)
    change(model)
    with pytest.raises(ValueError, match=message):
        follow(hook, model, 1)


def test_tied_weights_are_averaged_once_and_stay_tied(follow, fill, primed):
    """A tensor with two names moves once an update, and is one tensor in the average too, also in another dtype."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    hook = primed(model, 0.0, decay=0.5)
    fill(model, 4.0)
    follow(hook, model, 1)
    module = hook.get_averaged_model().module
    assert module[0].weight is module[1].weight
    assert module[0].weight[0, 0].item() == 2.0
    model.double()
    fill(model, 4.0)
    follow(hook, model, 2)
    assert module[0].weight is module[1].weight
    assert (module[0].weight[0, 0].item(), module[1].weight.dtype) == (3.0, torch.float64)


def test_frozen_and_integer_parameters_do_not_hurt(follow):
    """A frozen parameter stays what it is, and an integer parameter is copied."""
    model = nn.Linear(1, 1)
    model.bias.requires_grad_(False)
    model.levels = nn.Parameter(torch.tensor([3]), requires_grad=False)
    hook = EMAHook(decay=0.9)
    for step in range(3):
        model.levels.fill_(step)
        follow(hook, model, step)
    module = hook.get_averaged_model().module
    assert torch.equal(module.bias, model.bias)
    assert module.levels.tolist() == [2]


def test_complex_and_empty_and_scalar_parameters_are_averaged(follow, fill):
    """Complex parameters, parameters without elements and 0-dim parameters follow the same rule."""
    model = nn.Module()
    model.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    model.nothing = nn.Parameter(torch.zeros(0))
    model.scale = nn.Parameter(torch.zeros(()))
    hook = EMAHook(decay=0.75)
    for step, value in enumerate((0.0, 4.0)):
        with torch.no_grad():
            model.phase.fill_(value * 1j)
            model.scale.fill_(value)
        follow(hook, model, step)
    module = hook.get_averaged_model().module
    assert module.phase.tolist() == [1j, 1j]
    assert (module.scale.item(), module.nothing.shape) == (1.0, (0,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_expanded_buffer_is_averaged_as_the_tensor_it_shows(dtype, follow):
    """A buffer whose elements share memory becomes an ordinary one in the average."""
    model = nn.Linear(1, 1)
    model.register_buffer("mask", torch.zeros(1, dtype=dtype).expand(3))
    hook = EMAHook(decay=0.75)
    for step, value in enumerate((0.0, 4.0)):
        model.mask = torch.tensor([value], dtype=dtype).expand(3)
        follow(hook, model, step)
    assert hook.get_averaged_model().module.mask.tolist() == [1.0, 1.0, 1.0]
