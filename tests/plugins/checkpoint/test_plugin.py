"""What the distribution offers, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import nvalchemi_hooks_checkpoint
from nvalchemi.hooks import CheckpointableHook, Hook
from nvalchemi_hooks_checkpoint import CheckpointHook, plugin


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_it_offers_the_hook_and_no_defaults(root):
    """One offer, named checkpoint; it is not for "auto", as nobody but the user knows the folder."""
    (offer,) = plugin.nvalchemi_hooks()
    assert (offer.name, offer.default_kwargs) == ("checkpoint", None)
    assert offer.summary
    assert isinstance(offer.factory(root=root, every_steps=1), CheckpointHook)


def test_it_is_a_plain_hook_with_state(root):
    """It fulfils the protocols of a hook and of one that is saved with the run."""
    hook = CheckpointHook(root=root, every_steps=1)
    assert isinstance(hook, Hook)
    assert isinstance(hook, CheckpointableHook)


@pytest.mark.parametrize("module", ["nvalchemi_hooks_checkpoint", "nvalchemi_hooks_checkpoint.plugin"])
def test_importing_the_door_and_the_plugin_loads_neither_torch_nor_pydantic(module):
    """Both are loaded when the hook is used, not before; nor does looking for a checkpoint need them."""
    code = f"import sys, {module}; from nvalchemi_hooks_checkpoint import latest_checkpoint; "
    assert run(code + "print('torch' in sys.modules, 'pydantic' in sys.modules)") == "False False"


def test_the_door_lists_what_it_has():
    """Its names are public, and another is an AttributeError."""
    names = ["CheckpointHook", "best_checkpoint", "latest_checkpoint"]
    assert dir(nvalchemi_hooks_checkpoint) == nvalchemi_hooks_checkpoint.__all__ == names
    with pytest.raises(AttributeError, match="has no attribute 'EMAHook'"):
        nvalchemi_hooks_checkpoint.EMAHook  # noqa: B018


def test_the_public_doors_of_the_core_have_it():
    """The class is the same from every public import path."""
    code = (
        "from nvalchemi.training import CheckpointHook as a; from nvalchemi.training.hooks import CheckpointHook as b; "
        "from nvalchemi_hooks_checkpoint import CheckpointHook as c; print(a is b is c)"
    )
    assert run(code) == "True"


def test_it_joins_a_run_by_name(root, run, steps):
    """Named in the configuration of a strategy, it saves."""
    run({"checkpoint": {"root": str(root), "every_steps": 2}}, num_steps=4)
    assert steps(root) == [2, 4]
