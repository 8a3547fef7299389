"""What the page on writing hooks shows works, and does what the page says."""

from __future__ import annotations

import ast
import csv
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nvalchemi.hooks import list_hooks
from nvalchemi.testing import FakeSite
from nvalchemi.training import TrainingStage
from nvalchemi.training.hooks import TrainingUpdateHook

PAGE = (Path(__file__).parents[2] / "docs" / "writing-hooks.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(PROJECT,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Every program of the page has run, in order, in one namespace, in a folder of its own."""
    folder = tmp_path_factory.mktemp("page")
    namespace = {"__name__": "page"}
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
        patch.chdir(folder)
        torch.manual_seed(0)
        for program in PROGRAMS:
            exec(compile(program, "docs/writing-hooks.md", "exec"), namespace)
    return SimpleNamespace(**namespace, folder=folder)


@pytest.fixture
def installed(tmp_path):
    """The page's distribution, as an installation would leave it: its metadata, its entry point, its modules."""
    project = tomllib.loads(PROJECT)["project"]
    plugin = _kept(PROGRAMS[0]) + next(p for p in PROGRAMS if "@hookimpl" in p)
    with FakeSite(tmp_path).isolated() as site:
        site.add(
            project["name"],
            project["version"],
            hooks=project["entry-points"]["nvalchemi.hooks"],
            modules={"acme_hooks.noise": _kept(PROGRAMS[0], "GradNoiseHook"), "acme_hooks.plugin": plugin},
        )
        yield project["name"]


def _kept(program, *classes):
    """Return the imports of a program, and these of its classes."""
    kept = [
        node
        for node in ast.parse(program).body
        if isinstance(node, ast.Import | ast.ImportFrom) or (isinstance(node, ast.ClassDef) and node.name in classes)
    ]
    return "".join(f"{ast.unparse(node)}\n" for node in kept)


def _weights(strategy):
    return torch.cat([parameter.detach().flatten() for parameter in strategy.models["main"].parameters()])


def test_the_page_is_one_page():
    """What is longer is not read."""
    assert len(PAGE.splitlines()) <= 150


def test_noise_changes_the_weights(page):
    """Noisy gradients lead elsewhere; no noise leads where a run without the hook leads."""
    plain, silent = page.train(batches=page.batches), page.train(page.GradNoiseHook(std=0.0), batches=page.batches)
    assert torch.equal(_weights(silent), _weights(plain))
    assert not torch.allclose(_weights(page.noisy), _weights(plain), rtol=1e-5)
    assert page.noisy.step_count == len(page.batches)


def test_a_hook_is_found_after_the_run(page):
    """The strategy has its hooks in the order given."""
    given = [page.NormCeilingHook(), page.Trace(), page.GradNoiseHook(std=0.1)]
    assert list(page.train(*given, batches=page.batches).hooks) == given


def test_the_table_has_every_stage_method():
    """Each method that an update hook may override, with its arguments, and the docstring that has the stages."""
    methods = dict(re.findall(r"^\| `(\w+)\((.*?)\)` \|", PAGE, re.MULTILINE))
    own = {name for name, value in vars(TrainingUpdateHook).items() if callable(value) and not name.startswith("_")}
    assert set(methods) == own - {"labelled"}
    for name, arguments in methods.items():
        signature = getattr(TrainingUpdateHook, name).__code__
        names = signature.co_varnames[1 : signature.co_argcount + signature.co_kwonlyargcount]
        assert arguments.replace("*, ", "").split(", ") == list(names)
    assert all(stage.name in TrainingStage.__doc__ for stage in TrainingStage)


def test_the_log_has_a_row_for_every_batch(page):
    """The file was written, closed at the end, and can be read."""
    with (page.folder / "log.csv").open(newline="") as file:
        rows = [[float(value) for value in row] for row in csv.reader(file)]
    assert [(batch, step) for batch, step, _ in rows] == [(n, n) for n in range(1, len(page.batches) + 1)]
    assert all(loss > 0 for *_, loss in rows)


def test_the_log_is_closed_whatever_raises(page, tmp_path):
    """A run that fails leaves no open file."""
    logger = page.CSVLogger(tmp_path / "log.csv")
    with pytest.raises(TypeError):
        page.train(logger, batches=[*page.batches, (torch.ones(1, 3), None)])
    assert logger.file.closed
    assert len((tmp_path / "log.csv").read_text().splitlines()) == len(page.batches)


def test_the_trace_is_called_at_two_stages_of_every_fourth_step(page, capsys):
    """`_runs_on_stage` says where, `frequency` how often."""
    page.train(page.Trace(), batches=page.batches)
    expected = [f"{stage} at step {step}" for step in (0, 4) for stage in ("AFTER_LOSS", "AFTER_BACKWARD")]
    assert capsys.readouterr().out.splitlines() == expected


def test_accumulation_equals_big_batches(page):
    """Windows of four batches step as two batches of four times the size, and not as eight small ones."""
    big = [tuple(map(torch.cat, zip(*page.batches[i : i + 4], strict=True))) for i in (0, 4)]
    assert page.accumulated.step_count == 2
    assert torch.allclose(_weights(page.accumulated), _weights(page.train(batches=big)), rtol=1e-6, atol=0)
    assert not torch.allclose(_weights(page.accumulated), _weights(page.train(batches=page.batches)), rtol=1e-4)


@pytest.mark.parametrize(
    ("hook", "key", "reason"),
    [
        ("LossCeilingHook", "loss_ceiling", r"the loss is \d+"),
        ("NormCeilingHook", "norm_ceiling", r"the gradient norm is over 100"),
    ],
)
def test_a_veto_skips_the_step_and_says_why(page, hook, key, reason):
    """The bad batch leaves the weights where the good ones brought them; who and why stand in the outcome."""
    for strategy in (page.vetoed, page.train(getattr(page, hook)(), batches=[*page.batches, page.far])):
        assert strategy.step_count == len(page.batches)
        assert torch.equal(_weights(strategy), _weights(page.train(batches=page.batches)))
        outcome = strategy.orchestrator.last_outcome
        assert outcome.skipped
        assert re.fullmatch(reason, dict(outcome.vetoes)[key])


def test_the_distribution_is_found_and_used_by_name(page, installed):
    """Its hook is listed with where it comes from, joins by name, and does what the instance does."""
    (listed,) = (hook for hook in list_hooks() if hook.name == "grad_noise")
    assert listed.distribution == installed
    (by_name,) = re.findall(r"`(train\(.*?\))`", PAGE)
    named = eval(by_name, vars(page).copy())
    assert type(named.hooks[0]).__module__ == "acme_hooks.noise"
    assert torch.equal(_weights(named), _weights(page.noisy))


def test_the_loop_steps_what_was_not_vetoed(page):
    """Scheduler and count move with executed steps; the scale of a torch scaler survives a veto on finite gradients."""
    assert page.steps == len(page.batches)
    assert page.scheduler.get_last_lr() == pytest.approx([0.1 * 0.9**page.steps])
    assert page.scaler.get_scale() == 2.0**16
    assert page.ctx.outcome.vetoes[0].reason == "the gradient norm is over 100"
    assert all(parameter.isfinite().all() for parameter in page.model.parameters())
