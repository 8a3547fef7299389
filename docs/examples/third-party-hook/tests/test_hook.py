"""What this hook does, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from grad_centralization import GradCentralizationHook

from nvalchemi.testing import UpdateLoop


def stepped(gradient, *, start=None, **settings):
    """Return what one step of SGD with learning rate 1 subtracts from a parameter."""
    gradient = torch.as_tensor(gradient)
    weight = torch.nn.Parameter(torch.zeros_like(gradient) if start is None else start)
    hook = GradCentralizationHook(**settings)
    UpdateLoop(hook, optimizers=[torch.optim.SGD([weight], lr=1.0)]).batch({weight: gradient})
    return -weight.detach()


def test_each_output_loses_its_mean():
    """(1, 3) and (5, 5) become (-1, 1) and (0, 0)."""
    assert stepped([[1.0, 3.0], [5.0, 5.0]]).tolist() == [[-1.0, 1.0], [0.0, 0.0]]


def test_a_vector_is_left_alone():
    """Biases keep their gradient."""
    assert stepped([1.0, 3.0]).tolist() == [1.0, 3.0]


def test_convolutions_are_centralized_over_all_but_their_outputs():
    """With min_dims=4 a matrix keeps its gradient, and a convolution's has a mean of zero for each output."""
    torch.manual_seed(0)
    matrix, kernel = torch.randn(3, 4), torch.randn(3, 2, 5, 5)
    assert torch.equal(stepped(matrix, min_dims=4), matrix)
    assert stepped(kernel, min_dims=4).mean(dim=(1, 2, 3)).abs().amax() < 1e-6


def test_it_is_a_projection():
    """No norm grows, and centralizing twice is centralizing once, to rounding."""
    torch.manual_seed(0)
    gradient = torch.randn(6, 7, dtype=torch.float64)
    once = stepped(gradient)
    assert once.norm() < gradient.norm()
    torch.testing.assert_close(stepped(once), once, rtol=0.0, atol=1e-15)


def test_complex_weights_lose_a_complex_mean():
    """The mean of (1 + 1j, 3 + 5j) is 2 + 3j."""
    assert stepped([[1 + 1j, 3 + 5j]]).tolist() == [[-1 - 2j, 1 + 2j]]


@pytest.mark.parametrize("min_dims", [1, 0, -2, 2.0, True, "2", None])
def test_bad_settings_are_refused(min_dims):
    """The message has the value and the remedy."""
    with pytest.raises(ValueError, match="min_dims is .*; give an int of 2 or above"):
        GradCentralizationHook(min_dims=min_dims)
