"""What the distribution offers, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import nvalchemi_hooks_ema
from nvalchemi.hooks import HookOffer
from nvalchemi_hooks_ema import EMAHook, plugin


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_it_offers_the_hook_ready_to_use():
    """One offer, named ema, with defaults and a line of summary, that makes the hook."""
    (offer,) = plugin.nvalchemi_hooks()
    assert isinstance(offer, HookOffer)
    assert (offer.name, offer.factory, offer.default_kwargs) == ("ema", EMAHook, {})
    assert offer.summary
    assert offer.factory(**offer.default_kwargs).state_key == "ema"


@pytest.mark.parametrize("module", ["nvalchemi_hooks_ema", "nvalchemi_hooks_ema.plugin"])
def test_importing_the_door_and_the_plugin_loads_neither_torch_nor_pydantic(module):
    """Both are loaded when the hook is used, not before."""
    assert run(f"import sys, {module}; print('torch' in sys.modules, 'pydantic' in sys.modules)") == "False False"


def test_the_door_lists_what_it_has():
    """Only the class is public, and another name is an AttributeError."""
    assert dir(nvalchemi_hooks_ema) == nvalchemi_hooks_ema.__all__ == ["EMAHook"]
    with pytest.raises(AttributeError, match="has no attribute 'SWAHook'"):
        nvalchemi_hooks_ema.SWAHook  # noqa: B018


def test_the_public_doors_of_the_core_have_it():
    """The class is the same from every public import path."""
    code = (
        "from nvalchemi.training import EMAHook as a; from nvalchemi.training.hooks import EMAHook as b; "
        "from nvalchemi_hooks_ema import EMAHook as c; print(a is b is c)"
    )
    assert run(code) == "True"
