"""The guests' door: two offers under the names of the entry points, and torch only when a hook is made."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import nvalchemi_hooks_loss_scaling
from nvalchemi_hooks_loss_scaling import LossScalingHook, MixedPrecisionHook, plugin

DISTRIBUTION = Path(__file__).parents[3] / "plugins" / "loss-scaling"


def test_an_offer_stands_behind_each_entry_point():
    """Both entry points name this module, and it offers just these two names."""
    project = tomllib.loads((DISTRIBUTION / "pyproject.toml").read_text())["project"]
    entry_points = project["entry-points"]["nvalchemi.hooks"]
    assert set(entry_points.values()) == {plugin.__name__}
    assert {offer.name for offer in plugin.nvalchemi_hooks()} == set(entry_points)


def test_neither_joins_a_run_by_itself():
    """The precision of a run is its user's word: no offer has default arguments, so "auto" leaves both out."""
    assert [offer.default_kwargs for offer in plugin.nvalchemi_hooks()] == [None, None]
    assert all(offer.summary for offer in plugin.nvalchemi_hooks())


def test_the_factories_make_hooks_from_a_configuration():
    """Keyword arguments of a configuration reach the hooks."""
    offers = {offer.name: offer.factory for offer in plugin.nvalchemi_hooks()}
    scaling = offers["loss_scaling"](scale=128.0)
    precision = offers["mixed_precision"](precision="fp16", init_scale=8.0)
    assert isinstance(scaling, LossScalingHook)
    assert isinstance(precision, MixedPrecisionHook)
    assert (scaling.scaler.get_scale(), precision.scaler.get_scale()) == (128.0, 8.0)


def test_torch_is_imported_when_a_hook_is_made():
    """Importing the door and the plugin, and asking what it offers, loads neither torch nor pydantic."""
    code = (
        "import sys; import nvalchemi_hooks_loss_scaling as door\n"
        "from nvalchemi_hooks_loss_scaling.plugin import nvalchemi_hooks\n"
        "assert len(list(nvalchemi_hooks())) == 2 and 'LossScalingHook' in dir(door)\n"
        "assert not {'torch', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_door_names_what_it_has():
    """An unknown name is an AttributeError with the module in it; the public ones are all there."""
    assert sorted(dir(nvalchemi_hooks_loss_scaling)) == sorted(nvalchemi_hooks_loss_scaling.__all__)
    for name in nvalchemi_hooks_loss_scaling.__all__:
        assert getattr(nvalchemi_hooks_loss_scaling, name).__name__ == name
    with pytest.raises(AttributeError, match="'nvalchemi_hooks_loss_scaling' has no attribute 'LossScaling'"):
        _ = nvalchemi_hooks_loss_scaling.LossScaling


def test_the_public_doors_of_the_core_lead_here():
    """Both classes are had from nvalchemi.training and nvalchemi.training.hooks once this distribution is installed."""
    import nvalchemi.training
    import nvalchemi.training.hooks

    for door in (nvalchemi.training, nvalchemi.training.hooks):
        assert door.LossScalingHook is LossScalingHook
        assert door.MixedPrecisionHook is MixedPrecisionHook
