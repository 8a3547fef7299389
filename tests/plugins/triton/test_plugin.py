"""What the distribution offers, what importing it costs, and what is said where triton is missing."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

import nvalchemi_hooks_triton
from nvalchemi.hooks import HookOffer, ProvidesExecutor, TrainContext
from nvalchemi.training import TrainingStage
from nvalchemi_hooks_triton import TritonHook, plugin


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_it_offers_the_hook_but_not_to_everybody():
    """One offer, named triton, with a line of summary, that "auto" leaves out: it needs a GPU to be of use."""
    (offer,) = plugin.nvalchemi_hooks()
    assert isinstance(offer, HookOffer)
    assert (offer.name, offer.default_kwargs) == ("triton", None)
    assert offer.summary
    assert isinstance(offer.factory(), TritonHook)


@pytest.mark.parametrize("module", ["nvalchemi_hooks_triton", "nvalchemi_hooks_triton.plugin"])
def test_importing_the_door_and_the_plugin_loads_neither_torch_nor_triton(module):
    """Both are loaded when the hook is used, not before."""
    assert run(f"import sys, {module}; print('torch' in sys.modules, 'triton' in sys.modules)") == "False False"


def test_a_hook_loads_triton_when_it_is_set_up():
    """A hook that is only made, as by a listing or a test, does not load it; SETUP does."""
    code = """
import sys
from nvalchemi.hooks import TrainContext
from nvalchemi_hooks_triton import TritonHook
hook, loaded = TritonHook(), lambda: "nvalchemi_hooks_triton.kernels.device" in sys.modules
before = loaded()
hook.setup(TrainContext())
print(before, loaded())
"""
    assert run(code) == "False True"


def test_the_door_lists_what_it_has():
    """Only the class is public, and another name is an AttributeError."""
    assert dir(nvalchemi_hooks_triton) == nvalchemi_hooks_triton.__all__ == ["TritonHook"]
    with pytest.raises(AttributeError, match="has no attribute 'CudaHook'"):
        nvalchemi_hooks_triton.CudaHook  # noqa: B018


def test_the_public_doors_of_the_core_have_it():
    """The class is the same from every public import path."""
    code = (
        "from nvalchemi.training import TritonHook as a; from nvalchemi.training.hooks import TritonHook as b; "
        "from nvalchemi_hooks_triton import TritonHook as c; print(a is b is c)"
    )
    assert run(code) == "True"


def test_it_brings_its_executor():
    """The core asks it once for an executor; it is always the same one, also after a journey to another process."""
    hook = pickle.loads(pickle.dumps(TritonHook()))
    assert isinstance(hook, ProvidesExecutor)
    assert hook.update_executor() is hook.update_executor()
    assert repr(hook) == "TritonHook()"


@pytest.fixture
def without_programs(monkeypatch):
    """An interpreter that has not imported the programs yet."""
    monkeypatch.delitem(sys.modules, "nvalchemi_hooks_triton.kernels.device", raising=False)
    monkeypatch.delattr("nvalchemi_hooks_triton.kernels.device", raising=False)


def test_a_missing_triton_ends_the_run_at_setup(monkeypatch, without_programs):
    """The message names the hook, what is missing, and both ways to get it; the cause is kept."""
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match=r"TritonHook needs triton.*CUDA builds.*nvalchemi-hooks\[triton\]") as caught:
        TritonHook()(TrainContext(), TrainingStage.SETUP)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_broken_triton_ends_the_run_at_setup(monkeypatch, without_programs, tmp_path):
    """A triton that raises when it is imported is named with what it raised."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "triton.py").write_text("raise OSError('libcuda.so is of another time')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"cannot be imported \(OSError: libcuda.so is of another time\)"):
        TritonHook().setup(TrainContext())
