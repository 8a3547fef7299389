"""The model inside its wrappers."""

from __future__ import annotations

import torch
from torch import nn

from nvalchemi.training.unwrap import bare_module


def test_wrappers_come_off_in_whatever_order_they_were_put_on():
    """DataParallel and torch.compile are taken off, however they are nested."""
    net = nn.Linear(2, 1)
    assert bare_module(net) is net
    assert bare_module(nn.DataParallel(net)) is net
    assert bare_module(torch.compile(net)) is net
    assert bare_module(torch.compile(nn.DataParallel(net))) is net
    assert bare_module(nn.DataParallel(torch.compile(net))) is net


def test_attributes_of_the_users_own_are_no_wrappers():
    """A model with a child called ``module`` or ``_orig_mod`` is left alone: wrappers are known by what they are."""

    class Own(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.add_module(name, nn.Linear(2, 1))

    for name in ("module", "_orig_mod"):
        own = Own(name)
        assert bare_module(own) is own
        assert bare_module(nn.DataParallel(own)) is own
