"""When gradients are centralized, and the arithmetic of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from nvalchemi.training.hooks import TrainingUpdateHook

if TYPE_CHECKING:
    from nvalchemi.hooks import TrainContext

__all__ = ["GradCentralizationHook", "centralize_"]


class GradCentralizationHook(TrainingUpdateHook):
    r"""Take the mean out of weight gradients, output by output, just before the step.

    For a weight whose first dimension counts its outputs, :math:`g_i \leftarrow g_i - \mathrm{mean}(g_i)`. Hooks that
    act earlier (unscaling, clipping) see the gradients as they were.

    Parameters
    ----------
    min_dims : int
        At least 2: gradients with fewer dimensions are left alone. 4 centralizes convolutions only.

    Raises
    ------
    ValueError
        `min_dims` is not an int of 2 or above.

    References
    ----------
    H. Yong, J. Huang, X. Hua and L. Zhang, "Gradient Centralization: A New Optimization Technique for Deep Neural
    Networks", ECCV 2020, https://arxiv.org/abs/2004.01461.

    Examples
    --------
    >>> import torch
    >>> from nvalchemi.testing import UpdateLoop
    >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
    >>> loop = UpdateLoop(GradCentralizationHook(), optimizers=[torch.optim.SGD([weight], lr=1.0)])
    >>> _ = loop.batch({weight: [[1.0, 3.0], [5.0, 5.0]]})
    >>> weight.grad
    tensor([[-1.,  1.],
            [ 0.,  0.]])
    """

    name: ClassVar[str] = "grad_centralization"
    reads_grad = True  # it changes .grad, and finds true gradients there

    def __init__(self, *, min_dims: int = 2) -> None:
        if type(min_dims) is not int or min_dims < 2:
            raise ValueError(f"GradCentralizationHook: min_dims is {min_dims!r}; give an int of 2 or above")
        self.min_dims = min_dims

    def before_optimizer_step(self, ctx: TrainContext, *, will_skip: bool) -> bool:
        """Centralize, and let the step be taken; after a veto of another hook, change nothing."""
        if not will_skip:
            groups = (group["params"] for optimizer in ctx.optimizers for group in optimizer.param_groups)
            gradients = (parameter.grad for group in groups for parameter in group)
            centralize_(gradient for gradient in gradients if gradient is not None and gradient.dim() >= self.min_dims)
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}(min_dims={self.min_dims})"


def centralize_(gradients: Iterable[Tensor]) -> None:
    """Subtract from each gradient, in place, its mean over all dimensions but the first.

    Parameters
    ----------
    gradients : iterable of Tensor
        Two dimensions or more, real or complex; sparse ones with one sparse dimension and coalesced.

    Examples
    --------
    >>> import torch
    >>> gradient = torch.tensor([[1.0, 2.0, 6.0]])
    >>> centralize_([gradient])
    >>> gradient
    tensor([[-2., -1.,  3.]])
    """
    for gradient in gradients:
        # The values of a sparse gradient are rows as well, and those that it does not hold have a mean of zero.
        rows = gradient.values() if gradient.is_sparse else gradient
        rows.sub_(rows.mean(dim=tuple(range(1, rows.dim())), keepdim=True))
