"""What DO_BACKWARD can run ``backward()`` on."""

from __future__ import annotations

from torch import Tensor

from nvalchemi.errors import HookContractError

__all__ = ["differentiable"]


def differentiable(loss: object, hook: object = None) -> Tensor:
    """Return a loss with a graph, or say what is wrong with it; a `hook` returned it, or it was given."""
    if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
        return loss
    what = "the loss that was given" if hook is None else f"what {type(hook).__name__} returned at DO_BACKWARD"
    if not isinstance(loss, Tensor):
        raise HookContractError(f"DO_BACKWARD needs a loss to differentiate, but {what} is {loss!r}; give a tensor.")
    if not loss.requires_grad:
        raise HookContractError(
            f"DO_BACKWARD needs a loss to differentiate, but {what} has no graph (requires_grad is False); "
            "do not detach it, compute it from parameters that require gradients, and call DO_BACKWARD once a batch."
        )
    raise HookContractError(
        f"DO_BACKWARD needs a scalar to differentiate, but {what} has shape {tuple(loss.shape)}; take its mean or sum."
    )
