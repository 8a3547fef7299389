"""What a plugin may offer."""

from __future__ import annotations

import pytest

from nvalchemi.hooks import HookOffer


@pytest.mark.parametrize("name", ["", "auto", "*", "two words", "a:b", "a,b", "é", None, 3])
def test_a_name_that_a_configuration_could_not_write_is_refused(name):
    """Empty, reserved and non-ASCII names, and those with other characters, are a ValueError with the name in it."""
    with pytest.raises(ValueError, match="name is") as caught:
        HookOffer(name, factory=dict)
    assert repr(name) in str(caught.value)


def test_a_factory_that_cannot_be_called_is_refused():
    """The TypeError names the offer, the type of the factory, and what to give instead."""
    with pytest.raises(
        TypeError, match="HookOffer 'noise': factory is a dict, which cannot be called; give the hook's"
    ):
        HookOffer("noise", factory={})


@pytest.mark.parametrize("kwargs", [["eta"], {1: 2}, "eta=1"])
def test_default_kwargs_that_are_no_keyword_arguments_are_refused(kwargs):
    """Anything but a mapping from strings is a TypeError that names the offer and shows the value."""
    with pytest.raises(TypeError, match="HookOffer 'noise': default_kwargs is") as caught:
        HookOffer("noise", factory=dict, default_kwargs=kwargs)
    assert repr(kwargs) in str(caught.value)


def test_an_offer_keeps_its_own_copy_of_the_defaults():
    """Changing the mapping that was given does not change the offer, and the offer itself is frozen."""
    defaults = {"eta": 0.1}
    offer = HookOffer("noise", factory=dict, default_kwargs=defaults, summary="adds noise")
    defaults["eta"] = 9.0
    assert offer.default_kwargs == {"eta": 0.1}
    with pytest.raises(AttributeError):
        offer.name = "other"
